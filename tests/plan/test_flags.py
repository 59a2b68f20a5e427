"""Flags as XLA and libtpu themselves take them: whose they are, what is wrong with one, and every quote."""

import os
import subprocess
import sys

import pytest

from tests.terminal import terminal
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.core.flags import Flag, exports
from tpuswarm.plan import flags
from tpuswarm.plan.flags import check, meanings

VMEM = "xla_tpu_scoped_vmem_limit_kib"
PROGRAM = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.jit(lambda x: x + 1)(1.0)"


def test_each_is_of_the_library_that_knows_it():
    pytest.importorskip("libtpu")
    found = check({VMEM: "65536", "xla_dump_hlo_as_text": "true", "xla_jf_conv_full_precision": "true"})
    assert found.variables == {
        VMEM: "LIBTPU_INIT_ARGS", "xla_dump_hlo_as_text": "XLA_FLAGS", "xla_jf_conv_full_precision": "LIBTPU_INIT_ARGS",
    }  # fmt: skip
    assert found.unchecked == ()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("xla_dump_too", "/tmp", "neither XLA nor libtpu has a flag xla_dump_too; did you mean xla_dump_to?"),
        (VMEM[:-4], "1", f"neither XLA nor libtpu has a flag {VMEM[:-4]}; did you mean {VMEM}?"),
        ("qqq", "1", "neither XLA nor libtpu has a flag qqq"),
        ("xla_dump_hlo_as_text", "maybe", "xla_dump_hlo_as_text is of type bool and does not take 'maybe'"),
        (VMEM, "9x", f"{VMEM} does not take '9x'"),
        (VMEM, "6 5", f"{VMEM} is libtpu's, and libtpu reads no value that is empty or has a blank"),
        (VMEM, "", f"{VMEM} is libtpu's, and libtpu reads no value that is empty"),
        ("xla_dump_to", "/tmp/a\nb", "xla_dump_to cannot hold a line break"),
    ],
)
def test_what_is_wrong_is_a_sentence(name, value, said):
    pytest.importorskip("libtpu")
    with pytest.raises(InputError) as error:
        check({name: value})
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_what_is_no_flag_at_all_ends_nothing_but_the_question():
    pytest.importorskip("libtpu")
    with pytest.raises(RunFailed, match="cannot be told"):
        check({"help": "1"})


def test_without_libtpu_the_rest_is_taken_and_said_to_be_unchecked(monkeypatch):
    monkeypatch.setattr(flags.importlib.util, "find_spec", lambda name: None)
    flags._check.cache_clear()
    found = check({VMEM: "1", "xla_dump_to": "/tmp"})
    flags._check.cache_clear()
    assert found.unchecked == (VMEM,) and found.variables[VMEM] == "LIBTPU_INIT_ARGS"


def test_xla_says_what_its_flags_mean():
    found = meanings()["xla_dump_to"]
    assert found.kind == "string" and found.default == "" and "dump" in found.text.lower()


def test_no_name_is_broken_in_a_terminal_of_80_columns(tmp_path):
    with terminal(["flags", "show", "--known"], tmp_path) as opened:
        names = {line.split()[0] for line in opened.finish().splitlines() if line.startswith("xla_")}
    assert names == set(meanings())


@pytest.mark.parametrize("name", ["plain", "it's two words", 'a "quoted" $HOME `id` \\ name', "&& exit 7; #*?é"])
def test_a_value_reaches_xla_through_a_shell_as_it_was_given(tmp_path, name):
    """The folder in which a real XLA dumps is the one that was named; what the variable held before still holds."""
    folder = tmp_path / name
    there = {each: Flag(each, value, "XLA_FLAGS", "all", "all") for each, value in
             (("xla_dump_to", str(folder)), ("xla_dump_hlo_as_text", "true"))}  # fmt: skip
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path / 'before'} --xla_dump_hlo_as_html=true"}
    line = f"{exports(there)}exec {sys.executable} -c '{PROGRAM.replace(chr(39), chr(34))}'"
    subprocess.run(["/bin/bash", "-c", line], env=environment, check=True, timeout=120)
    kinds = {each.suffix for each in folder.iterdir()}
    assert ".txt" in kinds and ".html" in kinds and not (tmp_path / "before").exists()
