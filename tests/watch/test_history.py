"""A page's history of a run: a short run is complete, a long one keeps its shape, and new lines are read once."""

import json
from itertools import pairwise

import pytest

from tests.watch.fake_run import CYCLE_S, CYCLE_TOKENS, FakeRun
from tpuswarm.swarm.views.events import commit_sentence
from tpuswarm.train.run.directory import EVENTS, METRICS, append_event, append_rows
from tpuswarm.watch.page import json_lines
from tpuswarm.watch.page.history import MAX_COLUMNS, MAX_NEW_EVENTS, MAX_POINTS, NOT_COUNTED, History
from tpuswarm.watch.page.json_lines import JsonLines


@pytest.fixture
def run(tmp_path):
    return FakeRun(tmp_path / "run", 3, 1000)


def test_short_run_is_complete(run):
    run.grow(12, evaluated=4)
    history = History(run.folder, swarm=True)
    assert [column.version for column in history.columns] == list(range(1, 13)) and history.names == ["m0", "m1", "m2"]
    assert all(column.shares == [333, 333, 333] for column in history.columns)
    assert [tokens for tokens, _ in history.evaluations] == [3 * CYCLE_TOKENS * version for version in (4, 8, 12)]
    assert {round(speed.mean) for speed in history.speeds} == {round(3 * CYCLE_TOKENS / CYCLE_S)}
    rows = [json.loads(line) for line in (run.folder / METRICS).read_text().splitlines()]
    assert [point.mean for point in history.losses] == [row["loss"] for row in rows if "loss" in row]
    assert [event.kind for event in history.events] == ["started", *["commit"] * 12]


def test_updates_come_once_and_torn_lines_later(run):
    run.grow(2)
    history = History(run.folder, swarm=True)
    assert history.read_new() is not None and not history.read_new()
    run.lose_member("m1")
    run.grow(1)
    with (run.folder / EVENTS).open("a") as file:
        file.write('{"time": 1.0, "event": "al')
    updates = history.read_new()
    assert [event.kind for event in updates.events] == ["lost", "commit"] and "m1 killed" in updates.events[0].text
    assert updates.columns[0].shares == [500, None, 500] and updates.losses.start == 6
    assert all(2 * 3 * CYCLE_TOKENS < point.tokens <= 3 * 3 * CYCLE_TOKENS for point in updates.losses.points)
    assert not history.read_new()
    with (run.folder / EVENTS).open("a") as file:
        file.write('arm", "message": "look"}\n')
    assert [event.text for event in history.read_new().events] == ["alarm: look"]


def test_dropped_contribution_is_marked_and_damaged_lines_are_skipped(run):
    part = {"member": "m7", "incarnation": "0" * 32, "tokens": 5, "weight": 0, "fate": "dropped", "reason": "stale"}
    run.event(1.0, "commit", version=1, epoch=1, tokens=9, contributors=[], others=[part], rule="average", rate=1)
    run.event(2.0, "commit", version=2)
    (run.folder / METRICS).write_text('{"step": 1\n[1]\n{"step": 2, "loss": null, "tokens": 1}\n')
    history = History(run.folder, swarm=True)
    assert (
        history.names == ["m7"]
        and [column.shares for column in history.columns] == [[NOT_COUNTED]]
        and not history.losses
    )


def test_replaced_run_starts_a_new_history(run, tmp_path):
    run.grow(3)
    history = History(run.folder, swarm=True)
    (run.folder / METRICS).unlink()
    assert history.read_new() is None
    append_rows(run.folder / METRICS, [{"step": 1, "loss": 1.0}])
    assert history.read_new() is None, "another file of that name"


@pytest.mark.parametrize("rows", [3, 5, 8], ids=["shorter", "as long", "longer"])
def test_run_that_resumed_between_two_looks_starts_a_new_history(tmp_path, rows):
    """It cuts its rows to the checkpoint's step, and writes others."""
    append_rows(tmp_path / METRICS, ({"step": step, "tokens": step, "loss": 0.25} for step in range(1, 6)))
    history = History(tmp_path, swarm=False)
    lines = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    (tmp_path / METRICS).write_bytes(b"".join(lines[:2]))
    append_rows(tmp_path / METRICS, ({"step": step, "tokens": step, "loss": 0.75} for step in range(3, rows + 1)))
    assert history.read_new() is None
    assert [point.mean for point in History(tmp_path, swarm=False).losses] == [0.25] * 2 + [0.75] * (rows - 2)


def test_plain_run_has_tokens_and_speed(tmp_path):
    rows = [{"step": step, "tokens": 64 * step, "loss": 1 / step, "tokens_per_s": 100.0 * step} for step in range(1, 9)]
    append_event(tmp_path, "started")
    append_rows(tmp_path / METRICS, [*rows, {"step": 8, "tokens": 512, "eval_loss": 0.2}])
    history = History(tmp_path, swarm=False)
    assert [point.tokens for point in history.losses] == [64.0 * step for step in range(1, 9)]
    assert [speed.mean for speed in history.speeds] == [100.0 * step for step in range(1, 9)]
    assert history.evaluations == [[512, 0.2]] and not history.columns


def test_long_run_keeps_its_shape_in_limited_space(run, monkeypatch):
    monkeypatch.setattr(json_lines, "FULL_READ_BYTES", 10_000)
    run.grow(2000)
    history = History(run.folder, swarm=True)
    versions = [column.version for column in history.columns]
    assert len(versions) <= MAX_COLUMNS + 1 and versions == sorted(set(versions))
    assert versions[0] <= 2 and versions[-1] == 2000 and max(b - a for a, b in pairwise(versions)) < 30
    assert MAX_POINTS / 2 < len(history.losses) <= MAX_POINTS
    for point in history.losses[5:]:  # made of 2 + 3 / sqrt(version), and noise of 0.05
        version = point.tokens / (3 * CYCLE_TOKENS)
        assert abs(point.mean - (2 + 3 / (version + 1) ** 0.5)) < 0.15
    assert len(history.evaluations) == 200, "every evaluation, wherever it stands"
    for _ in range(10):
        run.grow(50)
        assert history.read_new()
    assert 100 < sum(point.tokens > 2000 * 3 * CYCLE_TOKENS for point in history.losses) < 150, "a fifth of the run"
    assert (
        len(history.columns) <= 2 * MAX_COLUMNS
        and len(history.losses) <= 2 * MAX_POINTS
        and history.columns[-1].version == 2500
    )


def test_speeds_of_a_run_with_many_versions_stay_evenly_spaced(run):
    run.grow(1100)
    history = History(run.folder, swarm=True)
    before = len(history.speeds)
    run.grow(50)
    assert history.read_new() and 24 <= len(history.speeds) - before <= 26


def test_too_many_updates_reload_the_page(run):
    history = History(run.folder, swarm=True)
    run.grow(MAX_NEW_EVENTS + 1)
    assert history.read_new() is None
    assert [event.kind for event in History(run.folder, swarm=True).events] == [
        "started",
        *["commit"] * (MAX_NEW_EVENTS + 1),
    ]


def test_older_events_are_loaded_back_to_the_first(run, monkeypatch):
    monkeypatch.setattr(json_lines, "READ_WINDOW_BYTES", 2000)
    run.grow(300)
    history = History(run.folder, swarm=True)
    found, at = [], history.events[0].at
    while at:
        shown_events, at = history.read_older(at)
        assert shown_events
        found = shown_events + found
    assert [item.kind for item in (*found, *history.events)] == ["started", *["commit"] * 300]


def test_line_longer_than_the_read_window(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "READ_WINDOW_BYTES", 64)
    file = JsonLines(tmp_path / METRICS)
    append_rows(tmp_path / METRICS, [{"a": "x" * 1000}, {"b": "y" * 1000}])
    assert len(file.read_new()) == 2
    (last,), at = file.read_before(None, 64)
    assert "b" in last.row and at == len(json.dumps({"a": "x" * 1000})) + 1
    assert file.read_before(0) == ([], 0)


def test_commit_of_many_members_is_summarised():
    parts = [{"member": f"m{n}", "weight": (n + 1) / 1000, "fate": "applied", "reason": ""} for n in range(40)]
    parts += [{"member": f"x{n}", "weight": 0.0, "fate": "stale", "reason": "late"} for n in range(15)]
    printed = commit_sentence(7, 1000, "tokens", parts)
    assert printed.startswith("commit 7: 40 members, 0.1% to 4.0% each; 1,000 tokens counted; x0 stale: late; ")
    assert printed.endswith("x11 stale: late; 3 more were not counted")
    assert commit_sentence(7, 1000, "rows", parts[:2]) == "commit 7: m0 0%, m1 0%; 1,000 rows counted"
