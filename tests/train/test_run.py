import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.run import METRICS, Run, append_event, find_run, holder, list_runs, new_folder, read_rows, status

CONFIG = {"recipe": {"name": "toy", "target": "", "options": {}}, "train": {"steps": 10}}


def make_run(folder):
    run = Run(folder)
    run.write_config(CONFIG)
    return run


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 60))
def test_metrics_are_cut_to_the_step_and_torn_lines_with_them(tmp_path_factory, written, step, torn):
    run = make_run(tmp_path_factory.mktemp("run"))
    for number in range(1, written + 1):
        run.write_metrics({"step": number, "loss": 1 / 3})
    path = run.folder / METRICS
    if written:
        with path.open("rb+") as file:
            file.truncate(max(0, path.stat().st_size - torn))
    whole = [row["step"] for row in read_rows(path)]
    run.cut_metrics(step)
    assert [row["step"] for row in read_rows(path)] == [number for number in whole if number <= step]
    assert not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    run.close()


def test_floats_come_back_bit_for_bit(tmp_path):
    run = make_run(tmp_path)
    values = [1 / 3, 1e-45, 3.4028234663852886e38, 0.1 + 0.2]
    run.write_metrics({"step": 1, "values": values})
    assert next(read_rows(tmp_path / METRICS))["values"] == values
    run.close()


def test_a_directory_in_use_is_refused_with_the_pid(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from tpuswarm.train.run import Run; run = Run(Path(sys.argv[1]));"
        "run.write_config({'recipe': {'name': 'x'}, 'train': {'steps': 1}}); print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=f"in use by process {other.pid}"):
            Run(tmp_path / "run")
        assert status(tmp_path / "run").pid == other.pid and status(tmp_path / "run").state == "running"
    finally:
        other.kill()
        other.wait()
    assert status(tmp_path / "run").state == "killed"
    Run(tmp_path / "run").close()


def test_a_directory_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="holds other things"):
        Run(tmp_path)
    with pytest.raises(InputError, match="is a file"):
        Run(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("event", ["finished", "stopped", "failed"])
def test_status_after_the_end(tmp_path, event):
    run = make_run(tmp_path)
    run.write_event("started", message="")
    run.write_metrics({"step": 1, "tokens": 64, "loss": 2.0, "tokens_per_s": 10.0})
    run.write_metrics({"step": 1, "tokens": 64, "eval_loss": 2.5})
    run.write_event(event, message="because")
    assert status(tmp_path).state == "running" and status(tmp_path).pid == os.getpid()
    run.close()
    seen = status(tmp_path)
    assert (seen.state, seen.step, seen.loss, seen.eval_loss, seen.message) == (event, 1, 2.0, 2.5, "because")
    assert holder(tmp_path) is None


def test_a_run_that_ends_at_once_leaves_its_reason_or_nothing(tmp_path):
    begun, new = make_run(tmp_path / "begun"), Run(tmp_path / "new")
    for run in (begun, new):
        run.fail("host 1 is gone")
        run.abandon()  # what another thread may do at the same time
    assert (status(begun.folder).state, status(begun.folder).message) == ("failed", "host 1 is gone")
    assert not new.folder.exists()


def test_an_event_after_a_torn_one_is_read(tmp_path):
    run = make_run(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(b'{"event": "started"}\n{"event": "sto')
    append_event(tmp_path, "finished", message="")
    assert [row["event"] for row in read_rows(tmp_path / "events.jsonl")] == ["started", "finished"]
    run.close()


def test_a_full_disk_under_the_metrics_is_named(tmp_path):
    run = make_run(tmp_path)
    (tmp_path / METRICS).symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"metrics.jsonl could not be written: the disk is full; .*: make room and"):
        run.write_metrics({"step": 1})
    run.close()


def test_runs_by_name(tmp_path):
    with pytest.raises(InputError, match="there are no runs"):
        find_run("last", tmp_path)
    for name in ("a", "b"):
        run = make_run(tmp_path / name)
        run.write_event("started", message="")
        run.close()
    os.utime(tmp_path / "a" / "events.jsonl", (2e9, 2e9))
    assert find_run("last", tmp_path) == tmp_path / "a"
    assert find_run("b", tmp_path) == tmp_path / "b"
    assert [folder.name for folder in list_runs(tmp_path)] == ["a", "b"]
    assert new_folder("a", tmp_path).name == "a-1"


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_directory_that_is_no_run(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"is no run|does not exist"):
        status(tmp_path / name)


def test_folders_of_other_tools_are_no_runs(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("[tool]\nname = 1\n")
    make_run(tmp_path / "ours").close()
    assert [folder.name for folder in list_runs(tmp_path)] == ["ours"]
    with pytest.raises(InputError, match="is of something else"):
        status(tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be a run directory"):
        Run(tmp_path / "file" / "run")


def test_config_that_is_no_toml(tmp_path):
    (tmp_path / "config.toml").write_text("[recipe\n")
    with pytest.raises(InputError, match=r"config.toml cannot be read"):
        status(tmp_path)


def test_lines_are_one_object_each(tmp_path):
    run = make_run(tmp_path)
    run.write_metrics({"step": 1})
    run.close()
    assert json.loads((tmp_path / METRICS).read_text()) == {"step": 1}
