"""The view of a swarm: two members or two hundred, on any screen."""

import random
import re
from dataclasses import replace

import pytest

from tests.train.look.test_live import drawn
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.swarm.views.drawing import About, draw, needing_a_look
from tpuswarm.swarm.views.status import MemberStatus, Progress, compose

HORIZON = 921_600
ABOUT = About("gpt2-tiny", "runs/demo", 768, "tokens")
SUMMARY = Summary(
    13, 1, False, "grace: 1 of 2 live members have pushed", Tokens(560_000, 489_984, 0, 63_104, 6_912), (), 3.0
)


def member(number, **changes):
    facts = {"state": "alive", "pid": 4_000_000 + number, "incarnation": f"{number:08x}", "base": 13, "tokens": 163_328}
    facts |= {"tokens_per_s": 3_600.0 + number, "loss": 2.1 + number / 1000, "grad_norm": 1.0, "lag": 0}
    return MemberStatus(**{"id": f"m{number}", **facts, **changes})


def status(members, alarms=(), summary=SUMMARY, horizon=HORIZON):
    progress = Progress(1e9 - 44, counted_per_s=10_000, eval_loss=2.2049, eval_version=9)
    return compose(summary, members, horizon, alarms, "host:1", {}, 1e9, progress)


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
    "commit 13", "goodput 98.6%", "63,104 in flight, 6,912 lost, 0 dropped", "grace: 1 of 2", "█▁", "4000000",
    "00000001",
)  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_every_fact_is_shown_at_any_width(width):
    text = "\n".join(draw_lines(status([member(0), member(1, state="lost")]), (3.0, 2.0), width))
    assert [words for words in LIVE if words not in text] == []


def test_view_adapts_to_what_is_known():
    assert draw_lines(status([member(0)]))[0] == "gpt2-tiny, 1 member: runs/demo"
    empty = "\n".join(draw_lines(status([], summary=None), height=16))
    assert "  0%" in empty and "held-out loss" in empty
    assert "rows/s" in "\n".join(draw_lines(status([member(0)]), about=replace(ABOUT, unit="rows")))
    ended = draw_lines(status([]), about=replace(ABOUT, ended=True))
    assert [line.strip() for line in ended if " elapsed" in line] == ["0:00:44 elapsed"], "no speed, no time left"


@pytest.mark.parametrize(("width", "height"), [(80, 16), (120, 32)])
@pytest.mark.parametrize("alarms", [(), (ALARM,), tuple(f"m{n} {ALARM[5:]}" for n in range(50))])
def test_two_hundred_members_fit(width, height, alarms):
    shuffled = HUNDREDS[:]
    random.Random(1).shuffle(shuffled)
    lines = draw_lines(status(shuffled, alarms), (1.0,), width, height)
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
    text = "\n".join(draw_lines(status(HUNDREDS)))
    assert all(f"\n{each.id} " in text for each in HUNDREDS)
    lines = draw_lines(status([member(number) for number in range(200)]), (1.0,), height=16)
    assert "200 members: 200 alive, 3,600 to 3,799 tokens/s each" in " ".join(lines)


def test_most_pressing_members_come_first():
    pressing = needing_a_look(status(HUNDREDS, (ALARM,)))
    assert [(each.id, reason) for each, reason in pressing] == [
        ("m198", "alarm"), ("m193", ""), ("m194", "4 commits behind"), ("m195", "slow"), ("m196", ""),
    ]  # fmt: skip
    assert needing_a_look(status([member(0), member(1, state="left", pid=None)])) == []


def test_nothing_moves_between_frames():
    early = Summary(None, 1, False, "", Tokens(0, 0, 0, 0, 0), (), None)
    joining = member(0, state="joining", pid=None, incarnation=None, base=None, tokens=0, tokens_per_s=None, loss=None)
    frames = [draw_lines(status([joining], summary=early)), draw_lines(status([member(0)]))]
    for words in ("member  state", " tokens counted", " left ", "held-out loss"):
        places = {(row, line.index(words)) for frame in frames for row, line in enumerate(frame) if words in line}
        assert len(places) == 1
    heads = [next(line for line in frame if line.startswith("member")) for frame in frames]
    assert heads[0] == heads[1]
