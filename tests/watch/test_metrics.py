"""Metrics: Prometheus's own parser reads them, they are what `status --json` says, and Grafana's queries find them."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.watch.made import MadeRun
from tpuswarm.swarm.views.status import look
from tpuswarm.train.run.listing import status
from tpuswarm.watch.page.metrics import exposition
from tpuswarm.watch.state import State

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"
FUNCTIONS = {"rate", "sum", "avg", "max", "min", "by", "topk", "increase", "deriv", "clamp_min"}


@pytest.fixture
def run(tmp_path):
    made = MadeRun(tmp_path / "run", 3, 100).lives()
    made.grow(7)
    made.lose("m1")
    yield made
    made.ends()


def samples(state: State, hosts=()) -> dict[tuple, float]:
    found = {}
    for family in text_string_to_metric_families(exposition(state, hosts).decode()):
        for each in family.samples:
            found[each.name, *sorted(each.labels.items())] = each.value
    return found


def test_they_are_what_status_says(run, typed, monkeypatch):
    monkeypatch.chdir(run.folder.parent)
    said = json.loads(typed("status", "run", "--json")[1])
    found = samples(State("run", look(run.folder), None, 5.0))
    assert found["tpuswarm_tokens_total",] == said["tokens"]["applied"] == 21_000
    assert found["tpuswarm_tokens_processed_total",] == said["tokens"]["processed"]
    assert found["tpuswarm_goodput_ratio",] == said["goodput"] and found["tpuswarm_loss",] == said["loss"]
    assert found["tpuswarm_version",] == said["version"] == 7 and found["tpuswarm_looked_timestamp_seconds",] == 5.0
    assert found["tpuswarm_run_state", ("state", said["state"])] == 1
    for each in said["members"]:
        assert found["tpuswarm_member_tokens_total", ("member", each["id"])] == each["tokens"]
    assert found["tpuswarm_members", ("state", "lost")] == 1 and found["tpuswarm_member_up", ("member", "m1")] == 0


def test_a_plain_run_and_one_that_has_not_begun_leave_out_what_nobody_knows(finished_run):
    found = samples(State("r", status(finished_run.run), None, 1.0))
    assert found["tpuswarm_run_state", ("state", "finished")] == 1 and ("tpuswarm_goodput_ratio",) not in found
    assert found["tpuswarm_steps_total",] == 60 and ("tpuswarm_remaining_seconds",) not in found
    bare = samples(State("gs://b/r", None, None, 1.0))
    assert bare["tpuswarm_run_state", ("state", "not begun")] == 1 and ("tpuswarm_loss",) not in bare


def test_names_keep_to_the_conventions(run):
    families = list(text_string_to_metric_families(exposition(State("r", look(run.folder), None, 1.0), ()).decode()))
    assert len(families) > 20
    for each in families:
        assert re.fullmatch(r"tpuswarm_[a-z][a-z_]*", each.name) and each.documentation.endswith(".")
        assert not re.search(r"milli|kilo|percent|minute", each.name), "base units"
        for sample in each.samples:
            assert (each.type == "counter") == sample.name.endswith("_total"), sample.name


def test_every_query_of_the_dashboard_finds_its_metrics(run):
    from tests.watch.fleets import fleet_state

    state, hosts = fleet_state(look(run.folder))
    known = {name for name, *_ in samples(state, hosts)}
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    used = set()
    for query in queries:
        metrics = names(query)
        assert metrics, query
        used |= metrics
    assert used <= known, used - known
    boxes = [each["gridPos"] for each in board["panels"]]
    for one in boxes:
        assert one["x"] >= 0 and one["x"] + one["w"] <= 24
        others = [each for each in boxes if each is not one]
        assert not any(
            one["x"] < each["x"] + each["w"] and each["x"] < one["x"] + one["w"]
            and one["y"] < each["y"] + each["h"] and each["y"] < one["y"] + one["h"] for each in others
        ), "two panels in one place"  # fmt: skip


def names(query: str) -> set[str]:
    """The metrics of a query, which has to be PromQL of the kind that the dashboard uses."""
    tokens = re.findall(r"\[\d+[smhd]\]|[a-zA-Z_:][\w:]*|\d+(?:\.\d+)?|==|[-+*/(),{}]|\"[^\"]*\"|=", query)
    assert "".join(tokens) == query.replace(" ", ""), f"cannot be parsed: {query}"
    depth = 0
    for token in tokens:
        depth += {"(": 1, ")": -1}.get(token, 0)
        assert depth >= 0, query
    assert depth == 0, query
    words = [each for each in tokens if re.match(r"[a-zA-Z_:]", each)]
    labels = set(re.findall(r"\b(?:by|without)\s*\(([^)]*)\)", query))
    plain = {each.strip() for group in labels for each in group.split(",")}
    found = {each for each in words if each not in FUNCTIONS | plain}
    for each in re.findall(r"(?:rate|increase|deriv)\(([a-z_]+)(\[?)", query):
        assert each[1] == "[", f"a range is missing: {query}"
    return found
