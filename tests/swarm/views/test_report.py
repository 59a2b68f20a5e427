"""The report of a swarm: its figures are those of the ledger, the events and the rows."""

import base64
import html
import random
import re
import shutil
from pathlib import Path

import pytest
import tomli_w

from tests.swarm.chains import PER_ROW
from tests.swarm.chains import Run as Chain
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.swarm.storage.ledger import commit_name
from tpuswarm.swarm.storage.objects import payload_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.views.report import Mark, Span, lives, replay_lines, write_report
from tpuswarm.swarm.views.status import Progress, compose, write_status
from tpuswarm.train.run.directory import append_event, append_rows

COMMITS = 8
PROGRESS = Progress(1e9 - 60, eval_loss=1.25, eval_version=COMMITS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished swarm's run of 8 commits and two members with rows, one of them lost; its chain."""
    folder = tmp_path_factory.mktemp("run") / "a<b"
    chain = Chain(Store(folder), random.Random(5), rule="nesterov").grow(COMMITS)
    config = {
        "recipe": {"name": "toy", "target": "toy", "options": {}},
        "train": {"steps": 1000, "batch": 2, "seed": 0},
        "swarm": {"members": 4, "cycle": 5, "outer": "nesterov", "quantize": "int8"},
        "chosen": {"tokens_per_row": PER_ROW, "devices": 2, "platform": "cpu"},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    rows = [
        {
            "step": step,
            "tokens": 16 * step,
            "loss": None if step == 7 else 5 / step,
            "member": name,
            "version": step // 5,
        }
        for name in ("m0", "m1")
        for step in range(1, 40)
    ]
    append_rows(folder / "metrics.jsonl", [*rows, {"step": 39, "tokens": 700, "eval_loss": 1.25, "version": COMMITS}])
    append_event(folder, "started", message="4 members", command="tpuswarm train 'a b' --members 4")
    for name in ("m0", "m1"):
        append_event(folder, "joined", member=name, incarnation=name * 16, pid=1)
    append_event(folder, "lost", member="m1", incarnation="m1" * 16, pid=1, message="killed <by hand>", tokens=77)
    append_event(folder, "alarm", message="no commit for 121 s")
    append_event(folder, "sample", step=1000, text="<once> upon")
    append_event(folder, "finished", message="finished: 1000 steps")
    tokens = Tokens(9000, chain.records[-1].tokens, 8, 0, 8992 - chain.records[-1].tokens)
    write_status(
        folder, compose(Summary(COMMITS, 1, False, "", tokens, (), 1.0), (), 16_000, (), "", {}, 1e9, PROGRESS)
    )
    return folder, chain


@pytest.fixture
def folder(made, tmp_path):
    """A copy that may be damaged."""
    return Path(shutil.copytree(made[0], tmp_path / "a<b"))


def test_a_page_that_needs_nothing_else(made, folder):
    chain = made[1]
    page = write_report(folder).read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == [
        "Loss", "What it writes", "Members", "Commits", "Tokens", "What happened", "Configuration",
    ]  # fmt: skip
    pictures = [base64.b64decode(each) for each in re.findall('src="data:image/png;base64,([^"]*)"', page)]
    assert len(pictures) == 3 and all(each.startswith(b"\x89PNG") and len(each) > 3000 for each in pictures)
    assert pictures[0] == (folder / "loss.png").read_bytes() and "http" not in page.replace("http://www.w3", "")
    assert "a&lt;b" in page and "a<b" not in page and "killed &lt;by hand&gt;" in page
    facts = dict(re.findall("<tr><th>([^<]*)</th><td[^>]*>([^<]*)</td></tr>", page))
    assert (
        facts["command"] == html.escape("tpuswarm train 'a b' --members 4") and "<pre>&lt;once&gt; upon</pre>" in page
    )
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d) to \1|.* to .*", facts["when"])
    newest = chain.records[-1]
    assert facts["commits"].startswith(f"{COMMITS}, ") and facts["held-out loss"] == "1.250"
    assert facts["members"].startswith("4, each with 2 x cpu") and facts["pushes"] == "every 5 steps, nesterov, int8"
    assert facts["tokens"] == f"{newest.tokens:,} of 16,000" and facts["processed"] == "9,000"
    assert facts["goodput"] == f"{newest.tokens / 9000:.2%}"
    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", page)]
    commits = [row for row in cells if len(row) == 8]
    assert [int(row[0]) for row in commits] == list(range(COMMITS, -1, -1))
    for row, record in zip(commits, reversed(chain.records), strict=True):
        applied = [each for each in record.decisions if each.fate == "applied"]
        assert (row[5], row[6]) == (f"{sum(each.tokens for each in applied):,}", f"{record.tokens:,}")
        assert row[3].count("%") == len(applied)
    of_members = {row[0]: int(row[2].replace(",", "")) for row in cells if len(row) == 6}
    assert sum(of_members.values()) == newest.tokens and len(of_members) == 4
    assert any("alarm: no commit for 121 s" in row[1] for row in cells if len(row) == 2)


def test_what_was_written_is_shown_before_the_first_commit_too(folder):
    for kind in ("commits", "headers", "objects", "payloads"):
        shutil.rmtree(folder / kind, ignore_errors=True)
    (folder / "metrics.jsonl").unlink()
    assert "<h2>Commits</h2>" in write_report(folder).read_text()


@pytest.mark.parametrize("harm", ["flip", "delete"])
def test_a_damaged_record_is_named(folder, harm):
    path = folder / commit_name(3)
    data = path.read_bytes()
    path.unlink() if harm == "delete" else path.write_bytes(data[:50] + b"x" + data[51:])
    with pytest.raises(RunFailed, match=r"commits/000003\.json"):
        write_report(folder)


def event(at, kind, **facts):
    return {"time": 1000.0 + at, "event": kind, **facts}


def joined(at, member, incarnation):
    return event(at, "joined", member=member, incarnation=incarnation)


def test_lives():
    events = [
        event(0, "started"),
        joined(5, "a", "1"),
        joined(6, "b", "2"),
        event(10, "lost", member="b"),
        joined(14, "b", "3"),
        joined(20, "b", "4"),  # refused, and again: no process was lost
        event(21, "coordinator", name="coordinator"),
        event(25, "left", member="a"),
        event(30, "commit"),
        event(1000, "started"),  # all of it was killed at 30 or soon after
        joined(1003, "b", "5"),
        event(1010, "stopped"),
        event(5000, "started"),
        joined(5001, "b", "6"),
        event(5002, "commit"),
    ]
    spans, marks, seconds = lives(events)
    assert sorted(spans) == [
        Span("a", "1", 5, 25), Span("b", "2", 6, 10), Span("b", "3", 14, 20), Span("b", "4", 20, 30),
        Span("b", "5", 33, 40), Span("b", "6", 41, 42),
    ]  # fmt: skip
    assert marks == [Mark("b", 10), Mark("coordinator", 21)] and seconds == 42


def test_the_ledger_as_lines(made, folder):
    chain = made[1]
    lines = list(replay_lines(Store(folder)))
    assert len(lines) == COMMITS + 2 and lines[0].startswith("commit 0: the initial state; sha256 ")
    for line, record in zip(lines, chain.records, strict=False):
        assert line.startswith(f"commit {record.version}: ") and chain.ledger.digest(record)[:8] in line
        applied = [each for each in record.decisions if each.fate == "applied"]
        for each in applied:
            assert f"{each.identity.incarnation.member} {each.weight:.0%} ({each.tokens:,})" in line
        assert ("recomputed, bit-identical" in line) == bool(applied)
        assert not applied or f"nesterov at {record.rate:g}" in line
    assert f"{chain.records[-1].tokens:,} tokens counted, none twice" in lines[-1]


def test_a_damaged_ledger_as_lines(made, folder):
    record = next(each for each in reversed(made[1].records) if each.rate)
    identity = next(each.identity for each in record.decisions if each.fate == "applied")
    name = payload_name(identity, 2)
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    lines = list(replay_lines(Store(folder)))
    assert any(name in line for line in lines[COMMITS + 1 :])
    again = [line.split(":")[0] for line in lines if "bit-identical" in line]
    assert f"commit {record.version}" not in again and len(again) > 3
