"""The report of a swarm and its tables of commits: their figures match the ledger, the events and the rows."""

import base64
import html
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.chains import PER_ROW, applied, counted_naively, memory_store
from tests.swarm.chains import Run as Chain
from tpuswarm.doctor.run import check_run
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.swarm.storage.ledger import commit_name
from tpuswarm.swarm.storage.objects import payload_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.views.missing_rows import missing_rows
from tpuswarm.swarm.views.overview import Overview, overview
from tpuswarm.swarm.views.report import Mark, Span, draw_commits, incarnation_spans, replay_lines, write_report
from tpuswarm.swarm.views.status import Progress, compose, write_status
from tpuswarm.swarm.views.tables import Commit, Verdict, read_commits
from tpuswarm.train.run.directory import append_event, append_rows, read_rows

COMMITS = 8
PROGRESS = Progress(1e9 - 60, eval_loss=1.25, eval_version=COMMITS)


@pytest.fixture(scope="module")
def finished_swarm(tmp_path_factory):
    """The folder and the chain of a finished run: 8 commits, rows of two members, of which one was lost."""
    folder = tmp_path_factory.mktemp("run") / "a<b"
    chain = Chain(Store(folder), random.Random(5), rule="nesterov").grow(COMMITS)
    config = {
        "recipe": {"name": "toy", "target": "toy", "options": {}},
        "train": {"steps": 1000, "batch": 2, "seed": 0},
        "swarm": {"members": 4, "cycle": 5, "outer": "nesterov", "quantize": "int8"},
        "chosen": {"tokens_per_row": PER_ROW, "devices": 2, "platform": "cpu"},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    append_event(folder, "started", message="4 members", command="tpuswarm train 'a b' --members 4")
    rows = []
    for name in ("m0", "m1"):
        append_event(folder, "joined", member=name, incarnation=name * 16, pid=1)
        for step in range(1, 40):
            loss = None if step == 7 else 5 / step
            rows.append({"step": step, "tokens": 16 * step, "loss": loss, "member": name, "version": step // 5})
    append_rows(folder / "metrics.jsonl", [*rows, {"step": 39, "tokens": 700, "eval_loss": 1.25, "version": COMMITS}])
    append_event(folder, "lost", member="m1", incarnation="m1" * 16, pid=1, message="killed <by hand>", tokens=77)
    append_event(folder, "alarm", message="no commit for 121 s")
    append_event(folder, "sample", step=1000, text="<once> upon")
    append_event(folder, "finished", message="finished: 1000 steps")
    tokens = Tokens(9000, chain.records[-1].tokens, 8, 0, 8992 - chain.records[-1].tokens)
    status = compose(Summary(COMMITS, 1, False, "", tokens, (), 1.0, False), (), 16_000, (), "", {}, 1e9, PROGRESS)
    write_status(folder, status)
    return folder, chain


@pytest.fixture
def folder(finished_swarm, tmp_path):
    return Path(shutil.copytree(finished_swarm[0], tmp_path / "a<b"))


def test_report_is_one_page_with_the_figures_of_the_ledger(finished_swarm, folder):
    chain = finished_swarm[1]
    page = write_report(folder).read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == [
        "Loss", "What it writes", "Members", "Commits", "Tokens", "What happened", "Configuration",
    ]  # fmt: skip
    pictures = [base64.b64decode(picture) for picture in re.findall('src="data:image/png;base64,([^"]*)"', page)]
    assert len(pictures) == 3 and all(picture.startswith(b"\x89PNG") and len(picture) > 3000 for picture in pictures)
    assert pictures[0] == (folder / "loss.png").read_bytes() and "http" not in page.replace("http://www.w3", "")
    assert "a&lt;b" in page and "a<b" not in page
    assert "killed &lt;by hand&gt;" in page and ">&lt;once&gt; upon</pre>" in page

    facts = dict(re.findall('<tr><th scope="row">([^<]*)</th><td[^>]*>([^<]*)</td></tr>', page))
    newest = chain.records[-1]
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d) to \1|.* to .*", facts["when"])
    assert facts["commits"].startswith(f"{COMMITS}, ") and facts["members"].startswith("4, each with 2 x cpu")
    assert {name: facts[name] for name in ("command", "held-out loss", "pushes", "tokens", "processed", "goodput")} == {
        "command": html.escape("tpuswarm train 'a b' --members 4"),
        "held-out loss": "1.250",
        "pushes": "every 5 steps, nesterov, int8",
        "tokens": f"{newest.tokens:,} of 16,000",
        "processed": "9,000",
        "goodput": f"{newest.tokens / 9000:.2%}",
    }

    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", page)]
    commits = [row for row in cells if len(row) == 8]
    assert [int(row[0]) for row in commits] == list(range(COMMITS, -1, -1))
    for row, record in zip(commits, reversed(chain.records), strict=True):
        assert (row[5], row[6]) == (f"{sum(decision.tokens for decision in applied(record)):,}", f"{record.tokens:,}")
        assert row[3].count("%") == len(applied(record))
    tokens_of_members = {row[0]: int(row[2].replace(",", "")) for row in cells if len(row) == 6}
    assert sum(tokens_of_members.values()) == newest.tokens and len(tokens_of_members) == 4
    assert any("alarm: no commit for 121 s" in row[1] for row in cells if len(row) == 2)


@pytest.mark.parametrize(
    ("is_lost", "sentence"),
    [
        (lambda row: row["member"] == "m1" and row["step"] in (5, 6, 9), "has no rows of steps 5 to 6, 9 of m1"),
        (lambda row: row["step"] > 1, "has rows of 32 tokens, fewer than the {:,} counted"),
    ],
)
def test_rows_that_a_power_cut_lost_are_named(finished_swarm, folder, typed, is_lost, sentence):
    path = folder / "metrics.jsonl"
    assert missing_rows(folder) == ""
    rows = [row for row in read_rows(path) if "loss" in row and not is_lost(row)]
    path.unlink()
    append_rows(path, rows)
    expected = f"metrics.jsonl {sentence.format(finished_swarm[1].records[-1].tokens)}: lost in a power cut, or damaged"
    assert expected in " ".join(typed("status", str(folder))[1].split())
    assert json.loads(typed("status", str(folder), "--json")[1])["missing_rows"] == expected
    assert ("rows", expected) in [(finding.check, finding.problem) for finding in check_run(folder, "a")]
    assert expected in html.unescape(write_report(folder).read_text())


@pytest.mark.parametrize("count", range(1, 8))
def test_commits_have_whole_numbers_on_the_axis(tmp_path, count):
    Chain(Store(tmp_path), random.Random(5)).grow(count)
    axes = draw_commits(overview(Store(tmp_path))).axes[0]
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_report_before_the_first_commit(folder):
    for kind in ("commits", "headers", "objects", "payloads"):
        shutil.rmtree(folder / kind, ignore_errors=True)
    (folder / "metrics.jsonl").unlink()
    assert "<h2>Commits</h2>" in write_report(folder).read_text()


def test_lives_of_members_are_read_from_the_events():
    events = [
        (0, "started", {}),
        (5, "joined", {"member": "a", "incarnation": "1"}),
        (6, "joined", {"member": "b", "incarnation": "2"}),
        (10, "lost", {"member": "b"}),
        (14, "joined", {"member": "b", "incarnation": "3"}),
        (20, "joined", {"member": "b", "incarnation": "4"}),  # refused, and again: no process was lost
        (21, "coordinator", {"name": "coordinator"}),
        (25, "left", {"member": "a"}),
        (30, "commit", {}),
        (1000, "started", {}),  # everything was killed at 30 or soon after
        (1003, "joined", {"member": "b", "incarnation": "5"}),
        (1010, "stopped", {}),
        (5000, "started", {}),
        (5001, "joined", {"member": "b", "incarnation": "6"}),
        (5002, "commit", {}),
    ]
    spans, marks, seconds = incarnation_spans(
        [{"time": 1000.0 + time, "event": kind, **facts} for time, kind, facts in events]
    )
    assert sorted(spans) == [
        Span("a", "1", 5, 25), Span("b", "2", 6, 10), Span("b", "3", 14, 20), Span("b", "4", 20, 30),
        Span("b", "5", 33, 40), Span("b", "6", 41, 42),
    ]  # fmt: skip
    assert marks == [Mark("b", 10), Mark("coordinator", 21)] and seconds == 42


def test_replay_prints_a_line_for_each_commit(finished_swarm, folder):
    chain = finished_swarm[1]
    lines = list(replay_lines(Store(folder)))
    assert len(lines) == COMMITS + 2 and lines[0].startswith("commit 0: the initial state; sha256 ")
    for line, record in zip(lines, chain.records, strict=False):
        assert line.startswith(f"commit {record.version}: ") and chain.ledger.digest(record)[:8] in line
        for decision in applied(record):
            assert f"{decision.identity.incarnation.member} {decision.weight:.0%} ({decision.tokens:,})" in line
        assert ("recomputed, bit-identical" in line) == bool(applied(record))
        assert not applied(record) or f"nesterov at {record.rate:g}" in line
    assert f"{chain.records[-1].tokens:,} tokens counted, none twice" in lines[-1]
    record = next(record for record in reversed(chain.records) if applied(record))
    name = payload_name(applied(record)[0].identity, 2)
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    damaged = list(replay_lines(Store(folder)))
    assert any(name in line for line in damaged[COMMITS + 1 :])
    assert not any("bit-identical" in line for line in damaged if line.startswith(f"commit {record.version}:"))


NAN = np.nan


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(0, 10))
def test_commits_and_totals_agree_with_a_naive_recount(source, commits):
    run = Chain(memory_store(), source, arrays=False).grow(commits)
    counted = counted_naively(run.records)
    assert [
        (member.member, member.contributions, member.applied, member.returned, member.dropped, member.void)
        for member in overview(run.store).totals
    ] == [(name, *counts.values()) for name, counts in sorted(counted["members"].items())]
    shown = read_commits(run.store, 5)
    assert [commit.version for commit in shown] == list(range(commits + 1))[-5:]
    for commit in shown:
        record = run.records[commit.version]
        for name in ("epoch", "time", "rule", "rate", "tokens"):
            assert getattr(commit, name) == getattr(record, name)
        for verdict, decision in zip(commit.verdicts, record.decisions, strict=True):
            identity = decision.identity
            assert (verdict.member, verdict.sequence) == (identity.incarnation.member, identity.sequence)
            for name in ("fate", "reason", "weight"):
                assert getattr(verdict, name) == getattr(decision, name)


def test_last_commits_are_shown_from_their_own_records(tmp_path, names_read):
    run = Chain(Store(tmp_path), random.Random(0), arrays=False).grow(8)
    names_read.clear()
    assert [commit.version for commit in read_commits(run.store, 3)] == [6, 7, 8]
    assert sorted(names_read) == [commit_name(version) for version in (6, 7, 8)]
    run.store.delete(commit_name(2))
    with pytest.raises(RunFailed, match=r"commits/000002\.json is missing"):
        read_commits(run.store, 3)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(3, [[0.75, NAN, 0.2], [0.5, NAN, 0.9]]), (400, [[0.5, 1, NAN, NAN, 0.2, NAN], [0.5, NAN, NAN, NAN, 0.8, 1]])],
)
def test_overview_averages_many_commits(monkeypatch, columns, shown):
    """Two incarnations of a member in one commit are added up; dropped work has no weight."""
    monkeypatch.setattr("tpuswarm.swarm.views.overview.MAX_COLUMNS", columns)
    commits = (
        [("a", 0.2), ("a", 0.3), ("b", 0.5)], [("a", 1.0), ("b", None)], [], [], [("a", 0.2), ("b", 0.8)], [("b", 1.0)]
    )  # fmt: skip
    built = Overview(len(commits))
    for version, weights in enumerate(commits):
        verdicts = [
            Verdict(name, "1", 1, "dropped" if weight is None else "applied", "", 1, 0, 8, weight or 0.0, 1.0)
            for name, weight in weights
        ]
        built.add(Commit(verdicts, version, 1, 0.0, "average", 1.0, 0.0, 0))
    np.testing.assert_allclose(built.weights, shown)
    assert built.others == {"dropped": [(1, "b")]}
    assert [commit.version for commit in built.newest] == list(range(6))
