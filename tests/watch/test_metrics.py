"""Prometheus metrics equal `status --json` and fit Grafana's queries; a page receives figures, then only changes."""

import json
import re
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.crash import die_at
from tests.fleet.loop import desired, pool
from tests.processes import ONE_DEVICE, Forked
from tests.watch.fake_run import FakeRun
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine, Worker
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.store.document import Document
from tpuswarm.swarm.views.status import RunView, read_run
from tpuswarm.train.run.directory import METRICS
from tpuswarm.train.run.life import last_start
from tpuswarm.train.run.listing import read_status
from tpuswarm.watch.page.metrics import metrics_text
from tpuswarm.watch.page.view import changed_sections, make_sections
from tpuswarm.watch.state import Machines, State
from tpuswarm.watch.top import Chip, Row

NOW = 1e9


def fleet_state(run: RunView | None) -> tuple[State, list[Row]]:
    """Return a fleet of two machines and its rows."""
    target = desired(pool(count=3))
    labels = {FLEET_LABEL: target.fleet, POOL_LABEL: "small"}
    machines = tuple(
        Machine(f"v2-usc1f-{number}", "us-central1-f", "tpu", "v2-8", "ready", "READY", how="spot", labels=labels,
                created=NOW - 7200, workers=(Worker("10.0.0.2", None),))
        for number in range(2)
    )  # fmt: skip
    lost = Event(NOW - 60, "small", "v2-usc1f-2", "preempted", "the cloud took it")
    document = Document("fleet", "rehearsal", "p", target, ("us-central1-f",), events=(lost,))
    chips = (Chip(0, 80.0, 2e9, 8e9), Chip(1, 60.0, 6e9, 8e9))
    rows = [Row("v2-usc1f-0/0", "busy", "", chips), Row("v2-usc1f-1/0", "idle", "no program")]
    return State("gs://b/run", run, Machines(document, Listing(machines, frozenset()), [lost]), NOW), rows


DASHBOARD_FILE = Path(__file__).parents[2] / "examples" / "grafana.json"


@pytest.fixture
def run(tmp_path):
    made = FakeRun(tmp_path / "run", 3, 100).take_lock()
    made.grow(7)
    made.lose_member("m1")
    yield made
    made.release()


def samples(state: State, hosts=()) -> dict[tuple, float]:
    found = {}
    for family in text_string_to_metric_families(metrics_text(state, hosts).decode()):
        for sample in family.samples:
            found[sample.name, *sorted(sample.labels.items())] = sample.value
    return found


def test_metrics_equal_status(run, typed, monkeypatch):
    monkeypatch.chdir(run.folder.parent)
    shown = json.loads(typed("status", "run", "--json")[1])
    found = samples(State("run", read_run(run.folder), None, 5.0))
    assert found["tpuswarm_tokens_total",] == shown["tokens"]["applied"] == 21_000
    assert found["tpuswarm_tokens_processed_total",] == shown["tokens"]["processed"]
    assert found["tpuswarm_goodput_ratio",] == shown["goodput"] and found["tpuswarm_loss",] == shown["loss"]
    assert found["tpuswarm_version",] == shown["version"] == 7 and found["tpuswarm_looked_timestamp_seconds",] == 5.0
    assert found["tpuswarm_run_state", ("state", shown["state"])] == 1
    for member in shown["members"]:
        assert found["tpuswarm_member_tokens_total", ("member", member["id"])] == member["tokens"]
    assert found["tpuswarm_members", ("state", "lost")] == 1 and found["tpuswarm_member_up", ("member", "m1")] == 0


def test_unknown_values_are_left_out(finished_run):
    found = samples(State("r", read_status(finished_run.run), None, 1.0))
    assert found["tpuswarm_run_state", ("state", "finished")] == 1 and ("tpuswarm_goodput_ratio",) not in found
    assert found["tpuswarm_steps_total",] == 60 and ("tpuswarm_remaining_seconds",) not in found
    bare = samples(State("gs://b/r", None, None, 1.0))
    assert bare["tpuswarm_run_state", ("state", "not begun")] == 1 and ("tpuswarm_loss",) not in bare


@pytest.mark.slow
def test_counters_never_fall_and_gauges_show_where_the_run_is(tmp_path, monkeypatch):
    """A run is killed after the row of step 16, and resumes; no scrape sees the counters reset."""
    folder, seen = tmp_path / "run", []
    for name, value in ONE_DEVICE.items():
        monkeypatch.setenv(name, value)
    for point in ("half a line of metrics written", "nowhere"):
        process = Forked([die_at.__file__, point, str(folder)])
        while process.poll() is None:
            if (folder / METRICS).exists():
                seen.append(samples(State("r", read_status(folder), None, 1.0)))
        seen.append(samples(State("r", read_status(folder), None, 1.0)))
    done = 16 + 20 - last_start(folder)["step"]
    for name, scale in (("tpuswarm_steps_total", 1), ("tpuswarm_tokens_total", 8)):
        values = [found[name,] for found in seen if (name,) in found]
        assert values == sorted(values) and values[-1] == done * scale > 20, name
    assert seen[-1]["tpuswarm_run_step",] == 20 and seen[-1]["tpuswarm_run_tokens",] == 160
    assert any(found["tpuswarm_run_step",] < before["tpuswarm_run_step",] for before, found in pairwise(seen))


def test_names_follow_prometheus_conventions(run):
    families = list(
        text_string_to_metric_families(metrics_text(State("r", read_run(run.folder), None, 1.0), ()).decode())
    )
    assert len(families) > 20
    for family in families:
        assert re.fullmatch(r"tpuswarm_[a-z][a-z_]*", family.name) and family.documentation.endswith(".")
        assert not re.search(r"milli|kilo|percent|minute", family.name), "base units"
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name


def test_every_query_of_the_dashboard_finds_its_metrics(run):
    state, hosts = fleet_state(read_run(run.folder))
    known = {name for name, *_ in samples(state, hosts)}
    board = json.loads(DASHBOARD_FILE.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    boxes = [panel["gridPos"] for panel in board["panels"]]
    assert all(box["x"] >= 0 and box["x"] + box["w"] <= 24 for box in boxes)
    for one, other in combinations(boxes, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"two panels overlap: {one}, {other}"
    for query in queries:
        metrics = set(re.findall(r"tpuswarm_\w+", query))
        assert metrics and metrics <= known, query
        assert query.count("(") == query.count(")"), query
        assert not re.search(r"(?:rate|increase|deriv)\([a-z_]+(?!\[)[^a-z_]", query), f"a range is missing: {query}"


def test_fleet_lists_machines_with_chips_and_reasons_for_missing_ones():
    state, rows = fleet_state(None)
    found = make_sections(state, rows)
    busy, idle = found["machines"]["v2-usc1f-0"], found["machines"]["v2-usc1f-1"]
    assert busy[:4] == ["small", "v2-8", "us-central1-f", "ready"] and busy[12:] == [70, [6e9, 8e9], 1]
    assert idle[12:14] == [None, None] and "v2-usc1f-2 was preempted" in found["machines"]["small: missing"][7]
    assert found["facts"]["wanted"] == 3 and found["facts"]["fleet"] == state.machines.document.desired.fleet
    assert len({len(row) for row in found["machines"].values()}) == 1


def test_only_changes_are_sent(tmp_path):
    run = FakeRun(tmp_path / "run", 5, 100).take_lock()
    run.grow(3)
    state, rows = fleet_state(read_run(run.folder))
    before = make_sections(state, rows)
    assert changed_sections(before, make_sections(state, rows)) == {}
    run.lose_member("m2")
    now = make_sections(fleet_state(read_run(run.folder))[0], rows)
    found = changed_sections(before, now)
    assert set(found["members"]) == {"m2"} and found["members"]["m2"][0] == "lost" and "machines" not in found
    gone = {**now, "members": {name: row for name, row in now["members"].items() if name != "m0"}}
    assert changed_sections(now, gone) == {"members": {"m0": None}}
    run.release()
