"""`tpuswarm plan` on the command line; all but one test replace the compiler."""

import importlib.util
import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tpuswarm import catalog
from tpuswarm.cli.plan.plan import _View
from tpuswarm.plan.compile.pool import CompilePool
from tpuswarm.plan.compile.request import CompileRequest, CompileResult, PlanOptions, Program, describe_target
from tpuswarm.plan.format import format_number
from tpuswarm.plan.row import Row
from tpuswarm.plan.swarm import estimate_swarm, swarm_tables
from tpuswarm.plan.table import plan_table

SMALL = Path(__file__).with_name("small_recipes.py")
SWARM = """\
name = "s"
[[pool]]
name = "small"
type = "v5e-1"
zones = ["us-central1-a"]
count = 3
[[pool]]
name = "more"
type = "v6e-1"
zones = ["us-east1-d"]
count = 20
[[grant]]
type = "v6e-1"
zone = "us-east1-d"
how = "spot"
count = 4
expires = 2099-01-31
[train]
recipe = "small_recipes.py:wide"
batch = 4100
tokens = 1_000_000
[train.options]
width = 512
"""
HAZARD = {"kind": "host transfer", "sentence": "a callback moves data", "file": "mine.py", "line": 7}
GIB = 2**30


GPU_TIME = {"compute_seconds": 0.06, "memory_seconds": 0.04}


def program(**values) -> Program:
    known = {
        "batch": 4096, "micro_batch": 4096, "micro_batches": 1, "sharding": "replicate", "remat": "none", "why": "",
        "precision": "bf16", "attention": "none", "tokens_per_row": 1, "model_flops": 10**9, "least_flops": 10**9,
        "flops_unknown": (), "state_bytes": 65_536, "moved_bytes": 131_072, "row_bytes": 512,
        "shared_elements": 16_384, "outer": "nesterov", "is_averaged": False,
    }  # fmt: skip
    return Program(**{**known, **values})


class StandIn:
    """A compiler for which everything fits."""

    cache_error = ""

    def __init__(self, cache, report):
        pass

    def results(self, requests):
        StandIn.only_lowered = [request.target.name for request in requests if request.lower_only]
        for request in requests:
            time = GPU_TIME if request.target.platform == "cuda" else {}
            made = program(batch=request.options.batch or 4096, **time)
            yield request, CompileResult(True, made, GIB, GIB, GIB, 5000, hazards=(HAZARD,))


@pytest.fixture
def plan(monkeypatch, typed, tmp_path):
    """Type `tpuswarm plan` and the words of a line beside small_recipes.py and swarm.toml; (code, out, err)."""
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "small_recipes.py").write_text(SMALL.read_text())
    (tmp_path / "swarm.toml").write_text(SWARM)
    monkeypatch.setattr("tpuswarm.cli.plan.plan.CompilePool", StandIn)
    return lambda line: typed("plan", *line.split())


@pytest.fixture
def plan_json(plan):
    def document(line):
        code, out, err = plan(f"{line} --json")
        assert code == 0, err
        return json.loads(out)

    return document


@pytest.mark.slow
def test_compiled_answer_is_cached_with_its_hazards_and_lines(plan, plan_json, monkeypatch):
    """With the real compiler; what else it finds: test_fit.py."""
    monkeypatch.setattr("tpuswarm.cli.plan.plan.CompilePool", CompilePool)
    line = "small_recipes.py:prints --on v5e-1 --batch 4096"
    first = plan_json(line)
    assert plan_json(line) == first, "seconds of compilation included: the second answer comes from the cache"
    assert "v5e-1: fits: 4096 rows per device" in plan(line)[2]
    [row] = first["rows"]
    assert row["fits"] is True and row["hbm_used_bytes"] == sum(row["memory"].values()) < row["hbm_bytes"]
    assert row["model_flops"] == 2 * 2 * 4096 * 128 * 128  # forward, and backward to the weights
    lines = SMALL.read_text().splitlines()
    assert any("jax.debug.print" in lines[hazard["line"] - 1] for hazard in row["hazards"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpt2-tiny --on rtx3090", "unknown TPU or GPU 'rtx3090': did you mean rtx-3090\\?"),
        ("swarm.toml --on h100 --on v5e-1", "swarm.toml names the TPUs: --on adds only GPUs of your own .*, not v5e-1"),
        ("swarm.toml --mine", "swarm.toml names the TPUs: leave --mine out, or name a recipe"),
        ("swarm.toml --members 3", "--members does not go with a file"),
        ("gpt2-tiny --mine --on v5e-1", "--mine names the TPUs: --on adds only GPUs of your own"),
        ("swarm.toml [train]=>[training]", r"has no key training; did you mean train\?"),
        ("swarm.toml width=>widht", "swarm.toml, line 23: train.options.widht: small_recipes.py:wide has no"),
        ("swarm.toml small_recipes.py:wide=>gpt3", "line 19: train.recipe: unknown recipe 'gpt3'"),
        ("gpt2-tiny --mine 2099=>2020", r"has no \[\[grant\]\] that is valid now"),
    ],
)
def test_wrong_input_is_one_sentence(plan, tmp_path, line, words):
    """`old=>new` replaces text in swarm.toml."""
    for change in (word for word in line.split() if "=>" in word):
        (tmp_path / "swarm.toml").write_text(SWARM.replace(*change.split("=>")))
        line = line.removesuffix(f" {change}")
    code, out, err = plan(line)
    assert (code, out) == (2, "")
    assert re.search(words, err) and err.count("error: ") == 1 and "Traceback" not in err


def test_speed_price_and_a_swarm(plan, plan_json):
    line = "small_recipes.py:prints --on v5e-1 --on v6e-1 --batch 4096 --tokens 10B --members 20"
    rows = {row["accelerator"]: row for row in plan_json(line)["rows"]}
    for name, row in rows.items():
        rate = catalog.find(name).price()
        assert row["floor_seconds"] <= row["step_seconds"]["low"] < row["step_seconds"]["high"]
        assert row["dollars"]["on_demand"]["low"] == pytest.approx(row["hours"]["low"] * rate.on_demand)
        assert {"step_seconds", "tokens_per_s", "hours", "dollars"} == set(row["estimates"])
        swarm = row["swarm"]
        assert swarm["tokens_per_s"]["low"] == pytest.approx(20 * row["tokens_per_s"]["low"])
        assert swarm["dollars"]["on_demand"]["low"] == pytest.approx(row["dollars"]["on_demand"]["low"])
        dollars = swarm["traffic_dollars_a_day"]
        assert set(dollars) == {"same zone", "same region", "same continent", "other continent", "internet"}
        assert dollars["same zone"] == {"exchange": 0, "data": 0}
        assert dollars["other continent"]["exchange"] > dollars["same continent"]["exchange"] > 0
        assert dollars["other continent"]["data"] == "unknown" and dollars["same continent"]["data"] > 0
        data = 4096 * 512 * 86_400 / row["step_seconds"]["low"]
        assert swarm["member_bytes_a_day"]["data"] == pytest.approx(data)
        assert swarm["estimate"] is True and swarm["head"]["memory_bytes"] > 2**30

    code, out, _ = plan(f"{line} --free")
    assert code == 0 and "a swarm of 20 members (estimate)" in out and "10,000,000,000 rows (estimate)" in out
    assert "v5e-1, v6e-1: hazard: a callback moves data (mine.py:7)" in out
    free = plan_json(f"{line} --free")["rows"][0]
    assert free["dollars"]["on_demand"] == {"low": 0, "high": 0} == free["dollars"]["spot"]
    assert free["swarm"]["traffic_dollars_a_day"] == rows["v5e-1"]["swarm"]["traffic_dollars_a_day"]


@pytest.fixture
def gpu_compiler(monkeypatch):
    monkeypatch.setattr("tpuswarm.cli.plan.plan.no_gpu_compiler", lambda gpu: "")


def test_gpus_and_tpus_are_planned_together(plan, plan_json, gpu_compiler):
    line = "small_recipes.py:wide --on v5e-1 --on h100 --batch 4096 --tokens 10B"
    tpu, gpu = plan_json(line)["rows"]
    assert (tpu["accelerator"], gpu["accelerator"], gpu["devices"]) == ("v5e-1", "h100-sxm", 1)
    assert gpu["hbm_bytes"] == pytest.approx(0.75 * 84942979072, rel=1e-3), "what JAX takes of 80 GB"
    assert (gpu["floor_seconds"], gpu["floor_by"]) == (pytest.approx(0.1), "compute")
    assert gpu["step_seconds"] == {"low": gpu["floor_seconds"], "high": 2 * gpu["floor_seconds"]}
    assert gpu["tokens_per_s"]["high"] == pytest.approx(4096 / 0.1)
    assert gpu["dollars"]["on_demand"] == "unknown" != tpu["dollars"]["on_demand"]

    code, out, _ = plan(f"{line} --members 2")
    prices = [line for line in out.splitlines() if line.startswith("h100-sxm") and "your own" in line]
    assert code == 0 and len(prices) == 1 and "a swarm of 2 members" in out
    assert "your own" not in plan(f"{line} --free")[1]


def test_missing_gpu_compiler_is_one_sentence(plan, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if "cuda" in name else find(name))
    code, out, err = plan("gpt2-tiny --on v5e-1 --on h100")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--on h100-sxm: " in err and "pip install 'tpuswarm[cuda]'" in err


def test_gpu_that_is_too_old_for_the_compiler_is_one_sentence(plan, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True if "cuda13" in name else find(name))
    code, out, err = plan("gpt2-tiny --on h100 --on v100")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--on v100: compute capability 7.0, and CUDA 13 needs 7.5" in err and "pip install 'tpuswarm[cuda12]'" in err


def test_gpu_needs_no_tpu_compiler(plan, monkeypatch, gpu_compiler):
    monkeypatch.setattr("tpuswarm.cli.plan.plan.no_compiler", lambda: "libtpu is not installed")
    assert "libtpu" not in plan("small_recipes.py:wide --on t4")[2]
    assert "note: libtpu is not installed" in plan("small_recipes.py:wide --on t4 --on v5e-1")[2]
    assert StandIn.only_lowered == ["v5e-1"]


def test_file_gives_recipe_batch_and_tpus(plan, plan_json):
    found = plan_json("swarm.toml")
    assert found["asked"]["options"] == {"width": "512"}
    rows = {row["accelerator"]: row for row in found["rows"]}
    assert {name: (row["batch"], row["tokens"], row["swarm"]["members"]) for name, row in rows.items()} == {
        "v5e-1": (4100, 1_000_000, 3), "v6e-1": (4100, 1_000_000, 20),
    }  # fmt: skip
    groups = [(group["accelerator"], group["how"], group["count"]) for group in found["together"]["groups"]]
    assert groups == [("v5e-1", "spot", 3), ("v6e-1", "spot", 4), ("v6e-1", "spot", 16)]  # a grant covers four
    assert 0 < found["together"]["dollars"]["low"] < found["together"]["dollars"]["high"]
    code, out, _ = plan("swarm.toml")
    assert code == 0 and "together, with preemptions (estimate)" in out
    assert "a swarm of 3 members" in out and "a swarm of 20 members" in out and "add up" in out


@pytest.mark.parametrize("line", ["swarm.toml", "small_recipes.py:wide --width 512 --mine --batch 4100"])
def test_gpus_of_ones_own_join_the_tpus_of_a_file(plan, plan_json, gpu_compiler, line):
    tpus, found = plan_json(line), plan_json(f"{line} --on rtx-3090 --on t4 --on rtx-3090")
    gpus = {row["accelerator"]: row["swarm"]["members"] for row in found["rows"][len(tpus["rows"]) :]}
    assert gpus == {"rtx-3090": 2, "t4": 1}
    alone, together = (document["together"] for document in (tpus, found))
    own = [(group["how"], group["count"], group["share_that_counts"]["low"]) for group in together["groups"][-2:]]
    assert own == [("your own", 2, 1), ("your own", 1, 1)], "never preempted"
    assert together["groups"][:-2] == alone["groups"]
    added = 3 * 4100 / (2 * sum(GPU_TIME.values()))
    assert together["tokens_per_s"]["low"] == pytest.approx(alone["tokens_per_s"]["low"] + added)
    assert "your own" in plan(f"{line} --on rtx-3090")[1]


def test_grants_are_planned_as_one_free_swarm(plan, plan_json):
    line = "small_recipes.py:wide --width 512 --batch 4100 --mine"
    [row] = plan_json(f"{line} --tokens 1M")["rows"]
    assert (row["accelerator"], row["swarm"]["members"]) == ("v6e-1", 4)
    assert row["dollars"]["spot"] == {"low": 0, "high": 0}
    _, out, _ = plan(line)
    assert "granted: 4 v6e-1 (spot) in us-east1-d, until 2099-01-31" in out
    assert "42 losses in 677 h" in " ".join(out.split()) and "rows until the last grant ends on 2099-01-31" in out


def render(width, *renderables):
    console = Console(width=width, file=StringIO())
    console.print(*renderables)
    return console.file.getvalue()


def test_table_shows_finished_and_running_rows():
    row = Row(catalog.find("v3-8"), CompileResult(None, problem="the compiler was stopped after 6 s"))
    text = render(200, plan_table("a recipe", [("v3-8", row, ""), ("v5e-8", None, "8 rows per device fit")]))
    assert "v3-8: unknown: the compiler was stopped after 6 s" in text and "v5e-8: 8 rows per device fit" in text


def test_running_compilation_shows_what_it_tries_and_for_how_long():
    request = CompileRequest(PlanOptions("any:recipe"), describe_target(catalog.find("v2-8")))
    view = _View("a recipe", [request])
    assert "v2-8: waiting" in render(80, view.draw())
    view.is_live = True
    view.show_state(request, "trying 24 rows per device (16 fit)")
    assert re.search(r"v2-8: . trying 24 rows per device \(16 fit\) … 0:00:0\d", render(80, view.draw()))


def test_terminal_of_80_columns_holds_the_name_of_every_gpu():
    made = program(batch=98_304, micro_batch=16, tokens_per_row=1024, **GPU_TIME)
    found = CompileResult(True, made, 10 * GIB, 55 * GIB, GIB // 4, 18, hazards=())
    for gpu in catalog.gpus():
        text = render(80, plan_table("a recipe", [(gpu.name, Row(gpu, found, 10_000_000_000), "")]))
        assert "…" not in text and text.count(gpu.name) == 4 and "65.25" in text


def test_terminal_of_80_columns_holds_every_figure():
    v5p = catalog.find("v5p-12288")
    made = program(batch=98_304, micro_batch=16, tokens_per_row=1024, model_flops=10**18, least_flops=10**18,
                   moved_bytes=48 * GIB, row_bytes=2048, shared_elements=1_558_000_000)  # fmt: skip
    found = CompileResult(True, made, 30 * GIB, 55 * GIB, GIB // 4, 18, hazards=())
    row, small_row = (Row(slice_, found, 10_000_000_000) for slice_ in (v5p, catalog.find("v3-8")))
    swarm, small_swarm = estimate_swarm(row, 200), estimate_swarm(small_row, 2)
    text = render(80, plan_table("a recipe", [(v5p.name, row, "")]), *swarm_tables([swarm, small_swarm]))
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines())
    assert len(small_swarm.head_machines) == 4
    [far] = [bill for bill in swarm.bills if bill.relation == "other continent"]
    figures = ["98,304", "85.25", "95.74", "us-central1", f"{format_number(200 * far.exchange)} + data"]
    figures += [format_number(swarm.traffic.data / GIB), str(swarm.head.cores)]
    figures += [machine.name.split()[-1] for machine in small_swarm.head_machines]
    assert not [figure for figure in figures if figure not in text]


@pytest.mark.parametrize(
    ("value", "three", "two"),
    [(0.0271, "0.0271", "0.027"), (9.96, "9.96", "10"), (99.4, "99.4", "99"), (269_701, "270,000", "270,000"),
     (999_999, "1M", "1M"), (7_388_466, "7.39M", "7.4M"), (177e6, "177M", "180M"), (4_178_781_062, "4.18B", "4.2B")],
)  # fmt: skip
def test_numbers_are_rounded_to_significant_digits(value, three, two):
    assert (format_number(value), format_number(value, 2)) == (three, two)
