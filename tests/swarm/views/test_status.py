"""status.json, and how a swarm of two members or two hundred looks on any screen, alive or not."""

import io
import json
import random
import re
from dataclasses import replace

import pytest
import tomli_w
from rich.console import Console

from tests.train.look.test_widgets import drawn
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.swarm.views.drawing import About, draw
from tpuswarm.swarm.views.screen import LiveScreen
from tpuswarm.swarm.views.status import (
    FILE,
    MemberStatus,
    Progress,
    carry_over,
    compose,
    read_run,
    read_status,
    write_status,
)
from tpuswarm.train.run.directory import Run, append_event

M0 = MemberStatus("m0", "alive", 11, "a" * 32, 4, 700, 50.0, 2.0, 1.0, 0)
M1 = MemberStatus("m1", "alive", 12, "b" * 32, 2, 300, 30.0, 3.0, 1.5, 2)
M2 = MemberStatus("m2", "joining", 13, None, None, 0, None, None, None, None)
PROGRESS = Progress(1e9 - 60, counted_per_s=64.0, eval_loss=2.75, eval_version=3)
SUMMARY = Summary(4, 2, False, "grace", Tokens(1000, 640, 40, 200, 120), (), 3.0, True)


def composed(summary=SUMMARY, members=(M0, M1, M2), progress=PROGRESS):
    return compose(summary, members, 6400, ["look"], "host:1", {"coordinator": 9}, 1e9, progress)


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


def test_run_that_starts_again_shows_its_commits_and_no_old_process(tmp_path):
    write_status(tmp_path, composed())
    carry_over(tmp_path, 7.0)
    seen = read_status(tmp_path)
    kept = ("version", "epoch", "tokens", "goodput", "eval_loss", "eval_version", "carried", "horizon")
    assert [getattr(seen, name) for name in kept] == [getattr(composed(), name) for name in kept]
    assert (seen.members, seen.processes, seen.alarms, seen.began) == ((), {}, (), 7.0)
    assert seen.phase == "resuming from commit 4"
    (tmp_path / FILE).write_text("torn")
    carry_over(tmp_path, 7.0)
    assert read_status(tmp_path) is None


def test_full_disk_is_reported(tmp_path):
    (tmp_path / f"{FILE}.part").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"status.json could not be written: the disk is full; .*: make room and"):
        write_status(tmp_path, composed())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text[:-20], "Invalid JSON"),
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


def test_run_that_goes_on_verifies(folder):
    seen = read_run(folder)
    assert (seen.status.version, seen.tokens, seen.loss, seen.status.horizon) == (None, 0, None, 6400), "no status yet"
    write_status(folder, composed())
    run = Run(folder)
    append_event(folder, "started", message="3 members")
    seen = read_run(folder)
    run.close()
    assert (seen.state, seen.recipe, seen.steps, seen.step, seen.tokens) == ("running", "toy", 100, 10, 640)
    assert (seen.loss, seen.eval_loss, seen.unit) == (2.5, 2.75, "tokens") and seen.status == composed() and seen.pid
    shown = json.loads(json.dumps(seen.json()))
    assert shown["members"][0] == {
        "id": "m0", "state": "alive", "pid": 11, "incarnation": "a" * 32, "base": 4, "tokens": 700,
        "tokens_per_s": 50.0, "loss": 2.0, "grad_norm": 1.0, "lag": 0, "carried": 0,
        "push_bytes_per_s": None, "round_trip_s": None,
    }  # fmt: skip
    assert shown["tokens"] == {"processed": 1000, "applied": 640, "dropped": 40, "outstanding": 200, "lost": 120}
    assert {"run", "recipe", "state", "message", "version", "alarms", "step", "loss"} <= shown.keys()


@pytest.mark.parametrize(("end", "state", "member_state"), [("finished", "finished", "left"), (None, "killed", "lost")])
def test_no_member_is_alive_after_the_run(folder, end, state, member_state):
    write_status(folder, composed())
    append_event(folder, "started", message="3 members")
    if end:
        append_event(folder, end, message="100 steps")
    seen = read_run(folder)
    assert (seen.state, seen.pid, seen.message) == (state, None, "100 steps" if end else "")
    assert {(member.state, member.pid, member.tokens_per_s) for member in seen.status.members} == {
        (member_state, None, None)
    }
    assert (seen.status.alarms, seen.tokens_per_s, seen.tokens, seen.status.left) == ((), 0.0, 640, None)
    assert seen.loss == 2.5 and seen.status.processes == {}
    assert seen.status.phase.startswith("ended; last status from 2001-09-")


def test_plain_run_is_not_a_swarm(folder):
    config = (folder / "config.toml").read_text().replace("[swarm]", "[other]")
    (folder / "config.toml").write_text(config)
    with pytest.raises(InputError, match="is a plain run"):
        read_run(folder)


ABOUT = About("gpt2-tiny", "runs/demo", 768, "tokens")
DEMO = Summary(
    13, 1, False, "grace: 1 of 2 live members have pushed", Tokens(560_000, 489_984, 0, 63_104, 6_912), (), 3.0, True
)


def member(number, **changes):
    facts = {"state": "alive", "pid": 4_000_000 + number, "incarnation": f"{number:08x}", "base": 13, "tokens": 163_328}
    facts |= {"tokens_per_s": 3_600.0 + number, "loss": 2.1 + number / 1000, "grad_norm": 1.0, "lag": 0}
    return MemberStatus(**{"id": f"m{number}", **facts, **changes})


def status_of(members, alarms=(), summary=DEMO, metrics=None):
    progress = Progress(1e9 - 44, counted_per_s=10_000, eval_loss=2.2049, eval_version=9, eval_metrics=metrics or {})
    return compose(summary, members, 921_600, alarms, "host:1", {}, 1e9, progress)


def draw_lines(shown, losses=(), width=80, height=None, about=ABOUT):
    lines = drawn(draw(about, shown, losses, width, height), width)
    assert all(len(line) <= width for line in lines) and len(lines) <= (height or len(lines))
    return lines


HUNDREDS = [
    *(member(number) for number in range(193)),
    member(193, state="lost", pid=None, tokens_per_s=None),
    member(194, lag=4, base=9),
    member(195, tokens_per_s=40.0),
    member(196, state="joining", base=None, tokens_per_s=None, loss=None, lag=None),
    member(197, state="left", pid=None, tokens_per_s=None),
    member(198),
    member(199, id="j-t1v-n-0a1b2c3d-w-0"),
]
ALARM = "m198 has a loss of 9.1, the others about 2.1: check its machine and its data"
LIVE = (
    "gpt2-tiny, 2 members: runs/demo", " 53%", "489,984 of 921,600 tokens counted", "0:00:44 elapsed",
    "0:00:43 left", "4.7 steps/s", "3,600 tokens/s", "training loss 2.100", "held-out loss 2.205 (commit 9)",
    "held-out accuracy 0.8125",
    "commit 13", "goodput 98.6%", "63,104 in flight, 6,912 lost, 0 dropped", "grace: 1 of 2", "█▁", "4000000",
    "00000001",
)  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_every_fact_is_shown_at_any_width(width):
    status = status_of([member(0), member(1, state="lost")], metrics={"eval_accuracy": 0.8125})
    text = "\n".join(draw_lines(status, (3.0, 2.0), width))
    assert [words for words in LIVE if words not in text] == []


def test_links_of_members_that_dialled_in_are_shown():
    ada = replace(M1, id="ada-home", push_bytes_per_s=2.36e6, round_trip_s=0.1042)
    seen = "\n".join(draw_lines(composed(members=(replace(M0, round_trip_s=0.001), ada)), width=200))
    assert "link" in seen and "18.9 Mbit/s, 104 ms" in seen and " 1 ms" not in seen
    assert "link" not in "\n".join(draw_lines(composed(), width=200))


def test_view_adapts_to_what_is_known():
    assert draw_lines(status_of([member(0)]))[0] == "gpt2-tiny, 1 member: runs/demo"
    empty = "\n".join(draw_lines(status_of([], summary=None), height=16))
    assert "  0%" in empty and "held-out loss" in empty
    assert "rows/s" in "\n".join(draw_lines(status_of([member(0)]), about=replace(ABOUT, unit="rows")))
    ended = draw_lines(status_of([]), about=replace(ABOUT, ended=True))
    assert [line.strip() for line in ended if " elapsed" in line] == ["0:00:44 elapsed"], "no speed, no time left"


@pytest.mark.parametrize(("width", "height"), [(80, 16), (120, 32)])
@pytest.mark.parametrize("alarms", [(), (ALARM,), tuple(f"m{n} {ALARM[5:]}" for n in range(50))])
def test_two_hundred_members_fit(width, height, alarms):
    shuffled = HUNDREDS[:]
    random.Random(1).shuffle(shuffled)
    lines = draw_lines(status_of(shuffled, alarms), (1.0,), width, height)
    text = "\n".join(lines)
    assert "…" not in text
    if len(alarms) > 1:
        assert "and 4" in lines[-1] and "more alarms" in lines[-1] and "need a look" in text
        return
    assert all(words in text for words in ("m193 ", "m194 ", "4 commits behind", "m195 ", "slow"))
    assert "m196 " in text or "1 of them needs a look" in text
    assert "m197" not in text and ("m198" in text) == bool(alarms)
    assert any(re.match(r"19\d more: \d+ alive", line) for line in lines)
    rest = r"alive,( 1 joining,)? 1 left, 3,600 to 3,799 tokens/s each, loss 2.100 to 2.29"
    assert re.search(rest, text.replace("\n", " "))


def test_every_member_is_shown_if_there_is_room_and_counted_if_not():
    text = "\n".join(draw_lines(status_of(HUNDREDS)))
    assert all(f"\n{member.id} " in text for member in HUNDREDS)
    lines = draw_lines(status_of([member(number) for number in range(200)]), (1.0,), height=16)
    assert "200 members: 200 alive, 3,600 to 3,799 tokens/s each" in " ".join(lines)


@pytest.mark.parametrize("summary", [DEMO, None])
def test_run_that_ends_before_its_first_commit_leaves_one_line(summary):
    console = Console(width=80, height=24, force_terminal=True, file=io.StringIO())
    live = LiveScreen(console)
    live.open(ABOUT, ())
    live.status(status_of([member(0, state="joining")], summary=summary))
    live.close()
    last = console.file.getvalue().rpartition("─")[2]
    assert ("before its first commit" in last) == (summary is None) and ("joining" in last) == (summary is not None)


def test_nothing_moves_between_frames():
    early = Summary(None, 1, False, "", Tokens(0, 0, 0, 0, 0), (), None, False)
    joining = member(0, state="joining", pid=None, incarnation=None, base=None, tokens=0, tokens_per_s=None, loss=None)
    frames = [draw_lines(status_of([joining], summary=early)), draw_lines(status_of([member(0)]))]
    for words in ("member  state", " tokens counted", " left ", "held-out loss"):
        places = {(row, line.index(words)) for frame in frames for row, line in enumerate(frame) if words in line}
        assert len(places) == 1
    heads = [next(line for line in frame if line.startswith("member")) for frame in frames]
    assert heads[0] == heads[1]
