"""Flags of XLA and libtpu: their library, their faults, their quotes in a shell."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.terminal import terminal
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.decide.flags import Flag, shell_exports
from tpuswarm.fleet.store.machine_flags import merge_env_vars
from tpuswarm.plan import flags
from tpuswarm.plan.flags import check_flags, xla_flag_help

pytestmark = pytest.mark.slow
VMEM = "xla_tpu_scoped_vmem_limit_kib"
PROGRAM = 'import jax; jax.config.update("jax_platforms", "cpu"); jax.jit(lambda x: x + 1)(1.0)'
needs_libtpu = pytest.mark.skipif(not flags.importlib.util.find_spec("libtpu"), reason="the plan extra is missing")


@needs_libtpu
def test_flags_are_assigned_to_the_library_that_knows_them():
    found = check_flags({VMEM: "65536", "xla_dump_hlo_as_text": "true", "xla_jf_conv_full_precision": "true"})
    assert found.variables == {
        VMEM: "LIBTPU_INIT_ARGS", "xla_dump_hlo_as_text": "XLA_FLAGS", "xla_jf_conv_full_precision": "LIBTPU_INIT_ARGS",
    }  # fmt: skip
    assert found.unchecked == ()


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("xla_dump_too", "/tmp", "neither XLA nor libtpu has a flag xla_dump_too; did you mean xla_dump_to?"),
        (VMEM[:-4], "1", f"neither XLA nor libtpu has a flag {VMEM[:-4]}; did you mean {VMEM}?"),
        ("qqq", "1", "neither XLA nor libtpu has a flag qqq"),
        ("xla_dump_hlo_as_text", "maybe", "xla_dump_hlo_as_text is of type bool and does not take 'maybe'"),
        (VMEM, "9x", f"{VMEM} does not take '9x'"),
        (VMEM, "6 5", f"{VMEM} is libtpu's, and libtpu accepts no empty value and no blanks"),
        (VMEM, "", f"{VMEM} is libtpu's, and libtpu accepts no empty value"),
        ("xla_dump_to", "/tmp/a\nb", "xla_dump_to cannot hold a line break"),
    ],
)
def test_wrong_flag_is_one_sentence(name, value, message):
    with pytest.raises(InputError) as error:
        check_flags({name: value})
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@needs_libtpu
@pytest.mark.parametrize(("value", "is_wrong"), [("65536", False), ("9x", True)])
def test_libtpu_reads_several_flags_of_a_pod_from_the_variables_of_its_metadata(monkeypatch, value, is_wrong):
    given = [Flag(name, value, "LIBTPU_INIT_ARGS", "all", "all") for name in ("xla_tpu_rwb_fusion", VMEM)]
    options = merge_env_vars("", [replace(given[0], value="true"), given[1]])
    variables = dict(word.split("=", 1) for word in options.split()[1::2])
    for name, text in {**flags.WITHOUT_TPU, **variables}.items():
        monkeypatch.setenv(name, text)
    done = subprocess.run([sys.executable, "-P", "-c", flags.PROGRAMS["LIBTPU_INIT_ARGS"]], capture_output=True)
    assert (done.returncode != 0, VMEM in done.stderr.decode()) == (is_wrong, is_wrong)


@needs_libtpu
def test_word_that_is_no_flag_is_reported():
    with pytest.raises(RunFailed, match="cannot be checked"):
        check_flags({"help": "1"})


def test_flags_of_libtpu_are_unchecked_without_it(monkeypatch):
    monkeypatch.setattr(flags.importlib.util, "find_spec", lambda name: None)
    flags._check.cache_clear()
    found = check_flags({VMEM: "1", "xla_dump_to": "/tmp"})
    flags._check.cache_clear()
    assert found.unchecked == (VMEM,) and found.variables[VMEM] == "LIBTPU_INIT_ARGS"


def test_meanings_are_xlas_and_no_name_is_broken_in_a_terminal_of_80_columns(tmp_path):
    dump_to = xla_flag_help()["xla_dump_to"]
    assert dump_to.kind == "string" and dump_to.default == "" and "dump" in dump_to.text.lower()
    with terminal(["flags", "show", "--known"], tmp_path) as opened:
        names = {line.split()[0] for line in opened.finish().splitlines() if line.startswith("xla_")}
    assert names == set(xla_flag_help())


def test_quoted_value_reaches_xla_through_a_shell(tmp_path):
    """XLA dumps into the named folder and keeps its earlier flags."""
    folder = tmp_path / 'it\'s "quoted" $HOME `id` \\ two words && exit 7; #*?é'
    set_flags = {
        name: Flag(name, value, "XLA_FLAGS", "all", "all")
        for name, value in (("xla_dump_to", str(folder)), ("xla_dump_hlo_as_text", "true"))
    }
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path / 'before'} --xla_dump_hlo_as_html=true"}
    line = f"{shell_exports(set_flags)}exec {sys.executable} -c '{PROGRAM}'"
    subprocess.run(["/bin/bash", "-c", line], env=environment, check=True, timeout=240)
    kinds = {path.suffix for path in folder.iterdir()}
    assert ".txt" in kinds and ".html" in kinds and not (tmp_path / "before").exists()
