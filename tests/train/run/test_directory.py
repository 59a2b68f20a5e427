import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.run import schema
from tpuswarm.train.run.directory import (
    EVENTS,
    METRICS,
    Run,
    append_event,
    holder,
    new_folder,
    read_rows,
    read_rows_back,
)
from tpuswarm.train.run.listing import find_run, list_runs, newest_evaluation, newest_steps, status

CHOSEN = {"tokens_per_row": 1, "devices": 8, "device": "cpu"}
CONFIG = {
    "recipe": {"name": "toy", "target": "", "options": {}},
    "train": {"steps": 10, "batch": 8, "seed": 0},
    "chosen": CHOSEN,
}


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
        "import sys, time; from pathlib import Path; from tpuswarm.train.run.directory import Run;"
        "run = Run(Path(sys.argv[1]));"
        f"run.write_config({CONFIG}); print('held', flush=True); time.sleep(60)"
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
    with pytest.raises(InputError, match="is not empty"):
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
    lives = status(tmp_path)
    assert (lives.state, lives.pid, lives.tokens_per_s, lives.left) == ("running", os.getpid(), 10.0, None)
    run.close()
    seen = status(tmp_path)
    assert (seen.state, seen.step, seen.loss, seen.eval_loss, seen.message) == (event, 1, 2.0, 2.5, "because")
    assert holder(tmp_path) is None and seen.tokens_per_s is None and seen.unit == "rows"


def test_what_is_left_is_told_by_the_pace_of_the_newest_steps(tmp_path):
    run = make_run(tmp_path)
    for step, wall_s in ((1, 2.0), (2, 2.5), (3, 3.0), (4, 3.5)):
        run.write_metrics({"step": step, "tokens": step, "loss": 1.0, "tokens_per_s": 2.0, "wall_s": wall_s})
    seen = status(tmp_path)
    assert (seen.elapsed, seen.left) == (3.5, 3.0)  # six of ten steps, half a second each
    run.close()
    assert status(tmp_path).left is None


def test_only_the_end_of_long_metrics_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.run.listing.NEWEST", 5)
    run = make_run(tmp_path)
    run.write_metrics({"step": 1, "eval_loss": 4.0})
    for step in range(1, 50):
        run.write_metrics({"step": step, "tokens": step, "loss": 1 / step})
    run.close()
    seen = status(tmp_path)
    assert (seen.step, seen.eval_loss, seen.eval_step) == (49, 4.0, 1) and 1 < len(newest_steps(tmp_path)) < 10


def test_the_newest_evaluation(tmp_path):
    assert newest_evaluation(tmp_path) == {}
    rows = [{"step": 1, "eval_loss": 4.0}, {"step": 2, "loss": 1.0}, {"step": 3, "eval_loss": 3.5}, {"step": 4}]
    lines = [json.dumps(row) for row in rows]
    for count, expected in ((0, {}), (1, rows[0]), (2, rows[0]), (3, rows[2]), (4, rows[2])):
        (tmp_path / METRICS).write_text("".join(f"{line}\n" for line in lines[:count]))
        assert newest_evaluation(tmp_path) == expected
    (tmp_path / METRICS).write_text(f"{lines[0]}\n{lines[2][:-3]}")  # torn
    assert newest_evaluation(tmp_path) == rows[0]


def test_a_run_that_ends_at_once_leaves_its_reason_or_nothing(tmp_path):
    begun, new = make_run(tmp_path / "begun"), Run(tmp_path / "new")
    for run in (begun, new):
        run.fail("host 1 is gone")
        run.abandon()  # what another thread may do at the same time
    assert (status(begun.folder).state, status(begun.folder).message) == ("failed", "host 1 is gone")
    assert not new.folder.exists()


def test_an_event_after_a_torn_one_is_read(tmp_path):
    run = make_run(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(b'{"time": 1.0, "event": "started"}\n{"time": 2.0, "event": "sto')
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
    for name, newest in (("a", EVENTS), ("b", METRICS)):  # a step is a use as well
        (tmp_path / name / newest).touch()
        os.utime(tmp_path / name / newest, (2e9, 2e9))
        assert find_run("last", tmp_path) == tmp_path / name
        assert [folder.name for folder in list_runs(tmp_path)] == [name, *{"a", "b"} - {name}]
        os.utime(tmp_path / name / newest, (1e9, 1e9))
    assert find_run("b", tmp_path) == tmp_path / "b"
    assert new_folder("a", tmp_path).name == "a-1"
    for name in ("a", "b"):
        for path in (tmp_path / name).iterdir():
            os.utime(path, (1e9, 1e9))
        held = Run(tmp_path / name)  # in use now, whatever its files say
        assert find_run("last", tmp_path) == tmp_path / name
        held.close()


def test_a_name_that_means_two_runs_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a")).close()
    assert find_run("a") == Path("runs/a") and find_run("./runs/a") == Path("runs/a")
    make_run(Path("a")).close()
    with pytest.raises(InputError, match=r"a means both \./a and runs/a: say which you mean"):
        find_run("a")
    assert find_run("./a") == Path("a") and find_run("runs/a") == Path("runs/a")
    make_run(Path("runs/last")).close()
    with pytest.raises(InputError, match=r"last means the run used last, but runs/last exists too"):
        find_run("last")
    with pytest.raises(InputError, match="a run is a local folder or gs://BUCKET/FOLDER, not s3://bucket/run"):
        find_run("s3://bucket/run")


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_directory_that_is_no_run(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"is not a run|does not exist"):
        status(tmp_path / name)


def test_folders_of_other_tools_are_no_runs(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("[tool]\nname = 1\n")
    make_run(tmp_path / "ours").close()
    assert [folder.name for folder in list_runs(tmp_path)] == ["ours"]
    with pytest.raises(InputError, match="belongs to something else"):
        status(tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be a run directory"):
        Run(tmp_path / "file" / "run")


def test_config_that_is_no_toml(tmp_path):
    make_run(tmp_path).close()
    (tmp_path / "config.toml").write_text("[recipe\n")
    with pytest.raises(InputError, match=r"config.toml is not valid TOML: .* line 1.*restore a copy"):
        status(tmp_path)


ROWS = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]


def damaged(folder, *files):
    """A run of three steps with one checkpoint, without some of its files."""
    run = make_run(folder)
    for row in ROWS:
        run.write_metrics(row)
    (folder / "checkpoints" / "00000003").mkdir(parents=True)
    run.close()
    for name in files:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["checkpoints"], "has metrics.jsonl but no checkpoints/ to resume from"),
        (["checkpoints/00000003"], "has metrics.jsonl but no checkpoints/ to resume from"),
        (["config.toml"], "has metrics.jsonl and checkpoints/ but no config.toml"),
        (["config.toml", "metrics.jsonl"], "has checkpoints/ but no config.toml"),
        (["config.toml", "checkpoints", "lock"], "has metrics.jsonl but no config.toml"),
    ],
)
def test_a_run_that_lost_what_it_goes_on_from_is_left_alone(tmp_path, files, words):
    folder = damaged(tmp_path / "run", *files)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    with pytest.raises(InputError, match=f"{words}.*; restore a copy of it, or use another --run to start over"):
        Run(folder)
    assert before == sorted(path.relative_to(folder) for path in folder.rglob("*"))


@pytest.mark.parametrize("files", [["metrics.jsonl"], ["metrics.jsonl", "checkpoints"], ["lock"]])
def test_a_run_that_was_killed_early_goes_on(tmp_path, files):
    Run(damaged(tmp_path / "run", *files)).close()


def test_a_damaged_line_of_metrics_costs_itself_alone(tmp_path):
    path = damaged(tmp_path / "run") / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"step": "two"}\n' + b"".join(lines[1:]) + b'{"step": 4, "lo')
    assert list(read_rows(path)) == ROWS
    run = Run(tmp_path / "run")
    run.cut_metrics(2)
    assert list(read_rows(path)) == ROWS[:2]
    run.write_metrics(ROWS[2])
    assert list(read_rows(path)) == ROWS
    run.close()


LINES = [b'{"step": 1, "loss": 2.5}', b'{"step": 22, "text": "a\xc3\xa4"}', b"", b"torn", b"{"]


@given(st.lists(st.sampled_from(LINES)), st.integers(1, 60), st.booleans())
def test_from_the_last_row_back_rows_are_the_same(tmp_path_factory, lines, chunk, torn):
    path = tmp_path_factory.mktemp("run") / METRICS
    path.write_bytes(b"\n".join(lines) + b"\n" * (not torn))
    assert list(read_rows_back(path, chunk=chunk)) == list(read_rows(path))[::-1]
    assert list(read_rows_back(path, b'"text"', chunk=chunk)) == [row for row in read_rows(path) if "text" in row]


def test_for_the_last_row_of_a_long_file_the_others_are_not_read(tmp_path, monkeypatch):
    path = tmp_path / METRICS
    path.write_text("".join(f'{{"step": {number}, "loss": 0.5}}\n' for number in range(100_000)))
    parsed, inner = [], schema.parse_row
    monkeypatch.setattr(schema, "parse_row", lambda name, line: parsed.append(line) or inner(name, line))
    rows = read_rows_back(path)
    assert next(rows)["step"] == 99_999 and len(parsed) == 1
    os.truncate(path, 20)  # a run resumes
    assert all(row["step"] > 90_000 for row in rows)
    assert list(read_rows_back(tmp_path / "none.jsonl")) == []


def test_lines_are_one_object_each(tmp_path):
    run = make_run(tmp_path)
    run.write_metrics({"step": 1})
    run.close()
    assert json.loads((tmp_path / METRICS).read_text()) == {"step": 1}
