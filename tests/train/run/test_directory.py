"""A run directory survives damage, and one process holds it at a time; files and folders are written atomically."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.atomic import new_folder, write_atomically
from tpuswarm.train.run import schema
from tpuswarm.train.run.directory import (
    CONFIG,
    EVENTS,
    METRICS,
    Run,
    append_event,
    create_run_folder,
    holder_pid,
    read_config,
    read_rows,
    read_rows_back,
)
from tpuswarm.train.run.listing import find_run, list_runs, read_newest_updates, read_status

SETTINGS = {
    "recipe": {"name": "toy", "target": "", "options": {}},
    "train": {"steps": 10, "batch": 8, "seed": 0},
    "chosen": {"tokens_per_row": 1, "devices": 8, "device": "cpu"},
}


def make_run(folder, rows=()):
    run = Run(folder)
    run.write_config(SETTINGS)
    for row in rows:
        run.write_metrics(row)
    return run


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 60))
def test_metrics_are_cut_to_a_step_together_with_a_torn_line(tmp_path_factory, written, step, torn):
    run = make_run(
        tmp_path_factory.mktemp("run"), ({"step": number, "loss": 1 / 3} for number in range(1, written + 1))
    )
    path = run.folder / METRICS
    if written:
        os.truncate(path, max(0, path.stat().st_size - torn))
    intact = [row["step"] for row in read_rows(path)]
    run.cut_metrics(step)
    assert [row["step"] for row in read_rows(path)] == [number for number in intact if number <= step]
    assert not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    run.close()


ROWS = [{"step": step, "loss": 1 / 3, "values": [1e-45, 3.4028234663852886e38, 0.1 + 0.2]} for step in (1, 2, 3)]


def test_damaged_lines_cost_only_themselves(tmp_path):
    run = make_run(tmp_path, ROWS)
    path = tmp_path / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    assert [json.loads(line) for line in lines] == ROWS, "bit for bit"
    path.write_bytes(lines[0] + b'{"step": "two"}\n' + b"".join(lines[1:]) + b'{"step": 4, "lo')
    assert list(read_rows(path)) == ROWS
    run.cut_metrics(2)
    assert list(read_rows(path)) == ROWS[:2]
    run.write_metrics(ROWS[2])
    assert list(read_rows(path)) == ROWS
    (tmp_path / EVENTS).write_bytes(b'{"time": 1.0, "event": "started"}\n{"time": 2.0, "event": "sto')
    append_event(tmp_path, "finished", message="")
    assert [row["event"] for row in read_rows(tmp_path / EVENTS)] == ["started", "finished"]
    run.close()


LINES = [b'{"step": 1, "loss": 2.5}', b'{"step": 22, "text": "a\xc3\xa4"}', b"", b"torn", b"{"]


@given(st.lists(st.sampled_from(LINES)), st.integers(1, 60), st.booleans())
def test_rows_read_backwards_are_the_same(tmp_path_factory, lines, chunk, torn):
    path = tmp_path_factory.mktemp("run") / METRICS
    path.write_bytes(b"\n".join(lines) + b"\n" * (not torn))
    assert list(read_rows_back(path, chunk=chunk)) == list(read_rows(path))[::-1]
    assert list(read_rows_back(path, b'"text"', chunk=chunk)) == [row for row in read_rows(path) if "text" in row]


def test_last_row_of_a_long_file_is_read_without_the_others(tmp_path, monkeypatch):
    path = tmp_path / METRICS
    path.write_text("".join(f'{{"step": {number}, "loss": 0.5}}\n' for number in range(100_000)))
    parsed, parse_row = [], schema.parse_row
    monkeypatch.setattr(schema, "parse_row", lambda name, line: parsed.append(line) or parse_row(name, line))
    rows = read_rows_back(path)
    assert next(rows)["step"] == 99_999 and len(parsed) == 1
    os.truncate(path, 20)  # a run resumes
    assert all(row["step"] > 90_000 for row in rows)
    assert list(read_rows_back(tmp_path / "none.jsonl")) == []


def test_run_in_use_is_refused_with_the_pid(tmp_path):
    program = (
        "import sys; from pathlib import Path; from tpuswarm.train.run.directory import Run;"
        f"run = Run(Path(sys.argv[1])); run.write_config({SETTINGS}); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with pytest.raises(InputError, match=f"in use by process {other.pid}"):
            Run(tmp_path / "run")
        seen = read_status(tmp_path / "run")
        assert (seen.pid, seen.state) == (other.pid, "running")
        other.kill()
    assert read_status(tmp_path / "run").state == "killed"
    Run(tmp_path / "run").close()


def test_other_folders_are_refused_and_left_alone(tmp_path):
    make_run(tmp_path / "ours").close()
    for folder, file, text in (("papers", "thesis.tex", "x"), ("tool", CONFIG, "[tool]\nname = 1\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for read, name, words in (
        (Run, "papers", "is not empty"),
        (Run, "papers/thesis.tex", "is a file"),
        (Run, "papers/thesis.tex/run", "cannot be a run directory"),
        (read_status, "none", "does not exist"),
        (read_status, "empty", "is not a run"),
        (read_status, "tool", "belongs to something else"),
    ):
        with pytest.raises(InputError, match=words):
            read(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    assert [folder.name for folder in list_runs(tmp_path)] == ["ours"]
    (tmp_path / "ours" / CONFIG).write_text("[recipe\n")
    with pytest.raises(InputError, match=r"config.toml is not valid TOML: .* line 1.*restore a copy"):
        read_status(tmp_path / "ours")


def test_run_of_an_unknown_format_is_refused_and_left_alone(tmp_path):
    make_run(tmp_path).close()
    config = (tmp_path / CONFIG).read_text()
    assert "\nformat = 1\n" in config
    (tmp_path / CONFIG).write_text(config.replace("format = 1\n", ""))  # as runs had none at first
    Run(tmp_path).close()
    (tmp_path / CONFIG).write_text("format = 2\n[new]\nkey = 1\n")
    for read in Run, read_status:
        with pytest.raises(InputError, match=r"config.toml, line 1: format 2 is unknown .* or a newer one$"):
            read(tmp_path)
    assert (tmp_path / CONFIG).read_text() == "format = 2\n[new]\nkey = 1\n"


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (["checkpoints/00000003"], "has metrics.jsonl but no checkpoints/ to resume from"),
        (["config.toml"], "has metrics.jsonl and checkpoints/ but no config.toml"),
        (["config.toml", "metrics.jsonl"], "has checkpoints/ but no config.toml"),
        (["config.toml", "checkpoints", "lock"], "has metrics.jsonl but no config.toml"),
        (["metrics.jsonl"], None),
        (["metrics.jsonl", "checkpoints"], None),
        (["lock"], None),
    ],
)
def test_run_without_the_files_to_resume_from_is_left_alone(tmp_path, lost, words):
    """A killed run can resume: it writes config.toml first, and begins a checkpoint before any row."""
    make_run(tmp_path, ROWS).close()
    (tmp_path / "checkpoints" / "00000003").mkdir(parents=True)
    for name in lost:
        shutil.rmtree(tmp_path / name) if (tmp_path / name).is_dir() else (tmp_path / name).unlink()
    if words is None:
        Run(tmp_path).close()
        return
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=f"{words}.*; restore a copy of it, or use another --run to start over"):
        Run(tmp_path)
    assert before == sorted(tmp_path.rglob("*"))


def test_config_that_is_cut_anywhere_is_refused(tmp_path):
    with closing(Run(tmp_path / "run")) as run:
        run.write_config({**SETTINGS, "swarm": {"members": 2}})
    path = run.folder / CONFIG
    whole = path.read_bytes()
    assert read_config(run.folder)["swarm"] == {"members": 2}
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"config\.toml"):
            read_config(run.folder)


@pytest.mark.parametrize("event", ["finished", "stopped", "failed"])
def test_status_of_a_live_and_of_an_ended_run(tmp_path, event):
    row = {"loss": 2.0, "tokens_per_s": 10.0}
    steps = [{"step": step, "tokens": 64 * step, "wall_s": 1.5 + step / 2, **row} for step in (1, 2, 3, 4)]
    run = make_run(tmp_path, [*steps, {"step": 4, "tokens": 256, "eval_loss": 2.5}])
    run.write_event("started", message="")
    run.write_event(event, message="because")
    live = read_status(tmp_path)
    assert (live.state, live.pid, live.tokens_per_s) == ("running", os.getpid(), 10.0)
    assert (live.elapsed, live.left) == (3.5, 3.0)  # six of ten steps, half a second each
    run.close()
    ended = read_status(tmp_path)
    assert (ended.state, ended.step, ended.loss, ended.eval_loss, ended.message) == (event, 4, 2.0, 2.5, "because")
    assert holder_pid(tmp_path) is ended.tokens_per_s is ended.left is None and ended.unit == "rows"


def test_status_reads_only_the_end_of_long_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.run.listing.MAX_RECENT_UPDATES", 5)
    steps = ({"step": step, "tokens": step, "loss": 1 / step} for step in range(1, 50))
    make_run(tmp_path, [{"step": 1, "eval_loss": 4.0}, *steps]).close()
    seen = read_status(tmp_path)
    assert (seen.step, seen.eval_loss, seen.eval_step) == (49, 4.0, 1) and 1 < len(read_newest_updates(tmp_path)) < 10


def test_run_that_has_to_end_at_once_leaves_its_reason_or_nothing(tmp_path):
    begun, new = make_run(tmp_path / "begun"), Run(tmp_path / "new")
    for run in (begun, new):
        run.fail("host 1 is gone")
        run.abandon()  # another thread may do so too
    assert (read_status(begun.folder).state, read_status(begun.folder).message) == ("failed", "host 1 is gone")
    assert not new.folder.exists()


def test_full_disk_is_named(tmp_path):
    run = make_run(tmp_path)
    (tmp_path / METRICS).symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"metrics.jsonl could not be written: the disk is full; .*: make room and"):
        run.write_metrics({"step": 1})
    run.close()


def test_last_means_the_run_used_last(tmp_path):
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
    assert create_run_folder("a", tmp_path).name == "a-1"
    for name in ("a", "b"):
        for path in (tmp_path / name).iterdir():
            os.utime(path, (1e9, 1e9))
        with closing(Run(tmp_path / name)):  # in use now, whatever its files say
            assert find_run("last", tmp_path) == tmp_path / name


def test_name_that_means_two_runs_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a")).close()
    assert find_run("a") == Path("runs/a") and find_run("./runs/a") == Path("runs/a")
    for folder in ("a", "runs/last"):
        make_run(Path(folder)).close()
    assert find_run("./a") == Path("a") and find_run("runs/a") == Path("runs/a")
    for name, words in (
        ("a", r"a means both \./a and runs/a: say which you mean"),
        ("last", r"last means the run used last, but runs/last exists too"),
        ("s3://bucket/run", "a run is a local folder or gs://BUCKET/FOLDER, not s3://bucket/run"),
    ):
        with pytest.raises(InputError, match=words):
            find_run(name)


def test_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "one")

    def fail(_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="power cut"):
        write_atomically(path, "two")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_two_processes_may_write_a_shared_file_at_once(tmp_path, monkeypatch):
    """A command and a keeper save the versions of a machine's packages, and one of them failed."""
    path, replace = tmp_path / "file", Path.replace

    def replace_second(part: Path, to: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_atomically(path, "theirs", is_shared=True)
        return replace(part, to)

    monkeypatch.setattr(Path, "replace", replace_second)
    write_atomically(path, "ours", is_shared=True)
    assert path.read_text() == "ours" and list(tmp_path.iterdir()) == [path]


def test_folder_gets_its_name_once_all_is_in_it(tmp_path):
    with new_folder(tmp_path / "new" / "out") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "new" / "out").exists()
    assert (tmp_path / "new" / "out" / "file").read_text() == "whole"
    with pytest.raises(KeyError), new_folder(tmp_path / "failed") as folder:
        (folder / "file").write_text("half")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_folder_in_use_is_not_replaced_and_a_link_stays_one(tmp_path, monkeypatch):
    (tmp_path / "full" / "in").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with new_folder(tmp_path / "link") as folder:
        (folder / "file").write_text("whole")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "file").exists()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    current = "is the current folder; use a new one inside it"
    for name, words in ((".", current), (str(here), current), ("../full", "full already exists")):
        with pytest.raises(InputError, match=words):
            new_folder(Path(name)).__enter__()
