"""status.json, and how a swarm's run looks from outside, alive or not."""

import json
from dataclasses import replace

import pytest
import tomli_w

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.swarm.views.status import FILE, MemberStatus, Progress, compose, look, read_status, write_status
from tpuswarm.train.run.directory import Run, append_event

M0 = MemberStatus("m0", "alive", 11, "a" * 32, 4, 700, 50.0, 2.0, 1.0, 0)
M1 = MemberStatus("m1", "alive", 12, "b" * 32, 2, 300, 30.0, 3.0, 1.5, 2)
M2 = MemberStatus("m2", "joining", 13, None, None, 0, None, None, None, None)
PROGRESS = Progress(1e9 - 60, counted_per_s=64.0, eval_loss=2.75, eval_version=3)
SUMMARY = Summary(4, 2, False, "grace", Tokens(1000, 640, 40, 200, 120), (), 3.0)


def composed(summary=SUMMARY, members=(M0, M1, M2), time=1e9, progress=PROGRESS):
    return compose(summary, members, 6400, ["look"], "host:1", {"coordinator": 9}, time, progress)


def test_status_sums_up_the_members():
    status, m1_lost = composed(), composed(members=(M0, replace(M1, state="lost")))
    assert (status.version, status.epoch, status.phase) == (4, 2, "grace")
    assert (status.lag, m1_lost.lag) == (2, 0)
    assert status.tokens_per_s == 80.0 and status.goodput == 640 / 800
    assert (status.elapsed, status.left) == (60.0, 90.0)  # 5,760 tokens at 64 a second
    assert composed(progress=Progress(1e9)).left is None
    assert (status.loss, m1_lost.loss) == (2.5, 2.0)
    assert composed(members=(M0, replace(M1, state="left"))).loss == 2.5, "a member that ended with the run counts"
    before = composed(summary=None, members=(M2,))
    assert (before.version, before.goodput, before.lag, before.loss) == (None, None, None, None)
    assert before.tokens_per_s == 0.0


def test_written_status_is_read_back(tmp_path):
    assert read_status(tmp_path) is None
    for status in (composed(), composed(summary=None, members=())):
        write_status(tmp_path, status)
        assert read_status(tmp_path) == status


def test_full_disk_is_reported(tmp_path):
    (tmp_path / f"{FILE}.part").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"status.json could not be written: the disk is full; .*: make room and"):
        write_status(tmp_path, composed())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text[:-20], "Invalid JSON"),
        (lambda text: "", "Invalid JSON"),
        (lambda text: '{"step": 3}', "time: Field required"),
        (lambda text: text.replace('"alive"', '"alife"', 1), "members.0.state"),
    ],
)
def test_torn_or_foreign_file_is_named(tmp_path, change, problem):
    write_status(tmp_path, composed())
    (tmp_path / FILE).write_text(change((tmp_path / FILE).read_text()))
    with pytest.raises(InputError) as error:
        read_status(tmp_path)
    for words in (f"{tmp_path / FILE} is not a swarm status", problem, "remove it"):
        assert words in str(error.value)


@pytest.fixture
def folder(tmp_path):
    """A swarm's run of 100 steps of 8 rows of 8 tokens."""
    config = {
        "recipe": {"name": "toy", "target": "toy", "options": {}},
        "train": {"steps": 100, "batch": 8, "seed": 0},
        "swarm": {"members": 3},
        "chosen": {"tokens_per_row": 8},
    }
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    return folder


def test_live_run(folder):
    seen = look(folder)
    assert (seen.status.version, seen.tokens, seen.loss, seen.status.horizon) == (None, 0, None, 6400), "no status yet"
    write_status(folder, composed())
    run = Run(folder)
    append_event(folder, "started", message="3 members")
    seen = look(folder)
    run.close()
    assert (seen.state, seen.recipe, seen.steps, seen.step, seen.tokens) == ("running", "toy", 100, 10, 640)
    assert (seen.loss, seen.eval_loss, seen.unit) == (2.5, 2.75, "tokens") and seen.status == composed() and seen.pid
    shown = json.loads(json.dumps(seen.json()))
    assert shown["members"][0] == {
        "id": "m0", "state": "alive", "pid": 11, "incarnation": "a" * 32, "base": 4, "tokens": 700,
        "tokens_per_s": 50.0, "loss": 2.0, "grad_norm": 1.0, "lag": 0, "carried": 0,
    }  # fmt: skip
    assert shown["tokens"] == {"processed": 1000, "applied": 640, "dropped": 40, "outstanding": 200, "lost": 120}
    assert {"run", "recipe", "state", "message", "version", "alarms", "step", "loss"} <= shown.keys()


@pytest.mark.parametrize(("end", "state", "member_state"), [("finished", "finished", "left"), (None, "killed", "lost")])
def test_no_member_is_alive_after_the_run(folder, end, state, member_state):
    write_status(folder, composed())
    append_event(folder, "started", message="3 members")
    if end:
        append_event(folder, end, message="100 steps")
    seen = look(folder)
    assert (seen.state, seen.pid, seen.message) == (state, None, "100 steps" if end else "")
    assert {(each.state, each.pid, each.tokens_per_s) for each in seen.status.members} == {(member_state, None, None)}
    assert (seen.status.alarms, seen.tokens_per_s, seen.tokens, seen.status.left) == ((), 0.0, 640, None)
    assert seen.loss == 2.5 and seen.status.processes == {}
    assert seen.status.phase.startswith("ended; last status from 2001-09-")


def test_plain_run_is_not_a_swarm(folder):
    config = (folder / "config.toml").read_text().replace("[swarm]", "[other]")
    (folder / "config.toml").write_text(config)
    with pytest.raises(InputError, match="is a plain run"):
        look(folder)
