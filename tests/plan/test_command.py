"""`tpuswarm plan` as it is typed, with the real TPU compiler on small programs."""

import json
import re
import subprocess
from io import StringIO

import pytest
from rich.console import Console

from tests.terminal import PROGRAM
from tpuswarm import catalog
from tpuswarm.cli.plan.plan import DEFAULT_TPUS
from tpuswarm.plan.estimate import estimate, tables
from tpuswarm.plan.order import Found, Program
from tpuswarm.plan.row import Row
from tpuswarm.plan.table import table
from tpuswarm.plan.words import short

pytest.importorskip("libtpu", reason="the plan extra is not installed")

RECIPE = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tpuswarm import supervised

def wide(width: int = 16384):
    return supervised(
        lambda key: {"w": jnp.zeros(width)},
        lambda params, batch, key: jnp.mean(jnp.square(batch["x"] @ params["w"] - 1.0)),
        optax.sgd(0.1),
        {"x": np.zeros((2, width), np.float32)},
    )

def square(loss):
    return supervised(
        lambda key: {"w": jnp.zeros((128, 128))}, loss, optax.sgd(0.1), {"x": np.ones((8, 128), np.float32)}
    )

def eigenvalues(h):
    return jnp.linalg.eigvals(h.astype(jnp.float32)).real

def prints():
    def loss(params, batch, key):
        h = batch["x"] @ params["w"]
        jax.debug.print("{h}", h=h.sum())
        return jnp.mean(h)
    return square(loss)

def refused():
    return square(lambda params, batch, key: jnp.mean(eigenvalues(batch["x"] @ params["w"])))

def evaluated(refused: bool = False):
    def loss(params, batch, key):
        h = batch["x"] @ params["w"]
        if key is None and refused:
            h = eigenvalues(h)
        elif key is None:
            h = jnp.sort(jnp.tile(h.astype(jnp.float32), (4096, 32)), axis=0)
        return jnp.mean(h)
    return square(loss)

def bad_trace():
    return square(lambda params, batch, key: jnp.mean(batch["x"] @ jnp.ones((7, 7))))

def two_layers():
    return supervised(
        lambda key: {"first": jnp.zeros((1024, 1024)), "second": jnp.zeros(1024)},
        lambda params, batch, key: jnp.mean(batch["x"] @ params["first"] @ params["second"]),
        optax.sgd(0.1),
        {"x": np.ones((8, 1024), np.float32)},
        defaults={"accumulate": 2},
    )
"""

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
recipe = "my_recipe.py:wide"
batch = 4100
tokens = 1_000_000
[train.options]
width = 512
"""


def line_of(words: str) -> int:
    return next(number for number, line in enumerate(RECIPE.splitlines(), 1) if words in line)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with my_recipe.py; its cache of plans is shared, so that each program is compiled once."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_recipe.py").write_text(RECIPE)
    return folder


@pytest.fixture
def plan(monkeypatch, typed, project):
    """Type `tpuswarm plan` and the words of a line in the project; (code, out, err)."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("TPUSWARM_CACHE", str(project / "cache"))
    (project / "swarm.toml").write_text(SWARM)

    return lambda line: typed("plan", *line.split())


@pytest.fixture
def plan_rows(plan):
    """The rows of a plan as JSON, by TPU."""

    def rows(line):
        code, out, err = plan(f"{line} --json")
        assert code == 0, err
        return {row["accelerator"]: row for row in json.loads(out)["rows"]}

    return rows


def hazard_of(row, kind):
    [hazard] = [hazard for hazard in row["hazards"] if hazard["kind"] == kind]
    return hazard


MIB_USED = {"v2-8": 20.96, "v6e-8": 60.80}
"""For each device; real sizes: test_sizes.py."""


@pytest.mark.parametrize("on", [["v2-8", "v6e-8"], pytest.param(DEFAULT_TPUS, marks=pytest.mark.tpu_compiler)])
def test_gpt2_trains_with_the_attention_and_layers_of_each_generation(plan, plan_rows, on):
    """The oldest generations recompute layers; the newer ones do not."""
    line = f"gpt2-tiny --data fake --layers 2 --context 128 --batch 64 {' '.join(f'--on {tpu}' for tpu in on)}"
    rows = plan_rows(line)
    assert list(rows) == list(on)
    for name, row in rows.items():
        assert row["fits"] is True
        assert row["hbm_used_bytes"] == sum(row["memory"].values()) < row["hbm_bytes"]
        assert row["hbm_used_bytes"] <= 1.05 * MIB_USED.get(name, float("inf")) * 2**20, "it needs more than before"
        assert row["batch"] == 64 == row["micro_batch"] * catalog.find(name).devices
        assert row["precision"] == "bf16" and row["sharding"] == "replicate"
        assert {hazard["kind"] for hazard in row["hazards"]} <= {"matrix unit"}, "its matrices are small"
    assert {name for name, row in rows.items() if row["remat"] != "none"} == rows.keys() & {"v2-8", "v3-8"}
    flops = [row["model_flops"] for row in rows.values()]
    assert max(flops) < 1.001 * min(flops)  # in whatever form the attention is computed

    assert plan_rows(line) == rows  # seconds of compilation included: the second answer comes from the cache
    assert "v6e-8: fits: 8 rows per device" in plan(line)[2]


def test_gpt2_is_sharded_with_splash_attention(plan_rows):
    model = "gpt2-tiny --data fake --layers 1 --width 128 --heads 2 --context 128"
    [row] = plan_rows(f"{model} --batch 8 --shard fsdp --on v5e-8").values()
    assert (row["fits"], row["sharding"], row["attention"]) == (True, "fsdp", "splash")


def test_largest_micro_batch_fits_and_the_next_one_was_refused(plan):
    code, out, err = plan("my_recipe.py:wide --on v5litepod-1 --json")
    [row] = json.loads(out)["rows"]
    assert code == 0 and row["accelerator"] == "v5e-1" and row["fits"] is True
    bytes_a_row = 4 * 16384 * 4  # while training four batches are on a device
    assert 0.8 < row["micro_batch"] * bytes_a_row / row["hbm_bytes"] <= 1
    assert row["hbm_bytes"] < row["micro_batch_too_large"] * bytes_a_row * 1.02
    assert row["micro_batch"] < row["micro_batch_too_large"] <= row["micro_batch"] * 1.125
    assert f"v5e-1: {row['micro_batch_too_large']} rows per device are too many" in err


def test_refused_step_is_a_hazard_with_its_line(plan_rows):
    row = plan_rows("my_recipe.py:refused --on v5e-1 --batch 128")["v5e-1"]
    assert row["fits"] is False and "the compiler refuses my_recipe for TPU v5" in row["problem"]
    hazard = hazard_of(row, "refused")
    assert hazard["file"].endswith("my_recipe.py") and hazard["line"] == line_of("eigvals")


def test_evaluation_that_does_not_fit_or_is_refused_is_a_hazard(plan_rows):
    """The step fits: only a compilation of the evaluation can tell."""
    row = plan_rows("my_recipe.py:evaluated --on v5e-1 --batch 1024")["v5e-1"]
    assert row["fits"] is True and row["compilations"] == 2
    sentence = hazard_of(row, "evaluation")["sentence"]
    assert "its evaluation of 1024 rows per device needs " in sentence and sentence.endswith("use --eval-batch")

    row = plan_rows("my_recipe.py:evaluated --on v5e-1 --batch 128 --refused true")["v5e-1"]
    hazard = hazard_of(row, "refused")
    assert row["fits"] is True and hazard["line"] == line_of("eigvals")
    assert hazard["sentence"].startswith("in its evaluation the compiler refuses it: ")


def test_model_that_fits_nowhere_is_explained(plan, plan_rows):
    line = "gpt2-1558m --data fake --layers 800 --on v2-8 --batch 8"
    code, out, err = plan(line)
    assert code == 0 and " no " in out
    assert err.splitlines()[0] == "v2-8: compiling" and err.splitlines()[1].startswith("v2-8: too large: sharded: ")
    sentence = " ".join(out.split()).split("v2-8: does not fit: ")[1]
    assert re.search(r"form \(sharded: .*, layers recomputed\) needs .* more than the 7.48 available", sentence)
    assert "of it is the state" in sentence and "(v4, v5p, v6e, tpu7x; estimate): no slice of these" in sentence
    row = plan_rows(line)["v2-8"]
    assert row["fits"] is False and row["hbm_used_bytes"] == "unknown" and "needs" in row["problem"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpt2-tiny --on v5lite-8", r"did you mean v5litepod-8 \(also called v5e-8, "),
        ("gpt2-tiny --on v4:3x3x3", "v4:3x3x3: the catalogue has no v4 with topology 3x3x3; it has "),
        ("my_recipe.py:bad_trace --on v5e-1", rf"loss of my_recipe fails: TypeError: .*\.py:{line_of('ones((7, 7')}\)"),
        ("gpt2-tiny --on v5e-8 --batch 12", r"12 rows does not divide evenly over devices \(8\).*; use --batch 16\n"),
        ("gpt2-tiny --on v5e-8 --batch 16 --accumulate 4", r"\(4\) = 32; use --batch 32 or --accumulate 2\n"),
        ("swarm.toml --on v5e-1", "swarm.toml names the TPUs: leave --on out, or name a recipe"),
        ("swarm.toml --members 3", "which give the number of machines"),
        ("gpt2-tiny --mine --on v5e-1", "--on and --mine exclude each other"),
        ("swarm.toml [train]=>[training]", r"has no key training; did you mean train\?"),
        ("swarm.toml width=>widht", "swarm.toml, line 23: train.options.widht: my_recipe.py:wide has no"),
        ("swarm.toml my_recipe.py:wide=>gpt3", "line 19: train.recipe: unknown recipe 'gpt3'"),
        ("gpt2-tiny --mine 2099=>2020", r"has no \[\[grant\]\] that is valid now"),
    ],
)
def test_wrong_input_is_one_sentence(plan, project, line, words):
    """`old=>new` is what is changed in swarm.toml."""
    for change in (word for word in line.split() if "=>" in word):
        (project / "swarm.toml").write_text(SWARM.replace(*change.split("=>")))
        line = line.removesuffix(f" {change}")
    code, out, err = plan(line)
    assert (code, out) == (2, "")
    assert re.search(words, err) and err.count("error: ") == 1 and "Traceback" not in err


def test_hazards_speed_price_and_a_swarm(plan, plan_rows):
    line = "my_recipe.py:prints --on v5e-1 --on v6e-1 --batch 4096 --tokens 10B --members 20"
    rows = plan_rows(line)
    for name, row in rows.items():
        assert hazard_of(row, "host transfer")["line"] == line_of("debug.print")
        chip, rate = catalog.find(name).generation, catalog.find(name).price()
        assert row["model_flops"] == 2 * 2 * 4096 * 128 * 128  # forward, and backward to the weights
        compute = row["model_flops"] / chip.peak_bf16
        assert row["floor_seconds"] == pytest.approx(max(compute, 2 * row["state_bytes"] / chip.bandwidth))
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
        data = 4096 * 128 * 4 * 86_400 / row["step_seconds"]["low"]  # rows that are no text count as they are
        assert swarm["member_bytes_a_day"]["data"] == pytest.approx(data)
        assert swarm["estimate"] is True and swarm["head"]["memory_bytes"] > 2**30

    code, out, _ = plan(f"{line} --free")
    assert code == 0 and "a swarm of 20 members (estimate)" in out and "10,000,000,000 rows (estimate)" in out
    assert f"my_recipe.py:{line_of('debug.print')})" in " ".join(out.split()).split("v5e-1, v6e-1: hazard: ")[1]
    free = plan_rows(f"{line} --free")["v5e-1"]
    assert free["dollars"]["on_demand"] == {"low": 0, "high": 0} == free["dollars"]["spot"]
    assert free["swarm"]["traffic_dollars_a_day"] == rows["v5e-1"]["swarm"]["traffic_dollars_a_day"]


def test_file_gives_recipe_batch_and_tpus(plan):
    code, out, _ = plan("swarm.toml --json")
    found = json.loads(out)
    assert code == 0 and found["asked"]["options"] == {"width": "512"}
    rows = {row["accelerator"]: row for row in found["rows"]}
    assert {name: (row["batch"], row["tokens"], row["swarm"]["members"]) for name, row in rows.items()} == {
        "v5e-1": (4100, 1_000_000, 3), "v6e-1": (4100, 1_000_000, 20),
    }  # fmt: skip
    groups = [(group["accelerator"], group["how"], group["count"]) for group in found["together"]["groups"]]
    assert groups == [("v5e-1", "spot", 3), ("v6e-1", "spot", 4), ("v6e-1", "spot", 16)]  # a grant covers four
    assert 0 < found["together"]["dollars"]["low"] < found["together"]["dollars"]["high"]
    code, out, _ = plan("swarm.toml")
    assert "together, with simulated preemptions (estimate)" in out
    assert "a swarm of 3 members" in out and "a swarm of 20 members" in out and "add up" in out


def test_grants_are_planned_as_one_free_swarm(plan, plan_rows):
    line = "my_recipe.py:wide --width 512 --batch 4100 --mine"
    [(name, row)] = plan_rows(f"{line} --tokens 1M").items()
    assert (name, row["swarm"]["members"]) == ("v6e-1", 4)
    assert row["dollars"]["spot"] == {"low": 0, "high": 0}
    _, out, _ = plan(line)
    assert "granted: 4 v6e-1 (spot) in us-east1-d, until 2099-01-31" in out
    assert "42 losses in 677 h" in " ".join(out.split()) and "rows until the last grant ends on 2099-01-31" in out


def test_slice_that_does_not_divide_the_batch_leaves_the_others(plan_rows):
    rows = plan_rows("my_recipe.py:wide --width 512 --on v5e-1 --on v5e-8 --batch 4100")
    assert rows["v5e-1"]["fits"] is True and rows["v5e-8"]["fits"] == "unknown"
    assert "does not divide evenly over devices (8)" in rows["v5e-8"]["problem"]


def test_micro_batches_are_the_recipes_and_frozen_parameters_are_only_read(plan_rows):
    rows = plan_rows("my_recipe.py:two_layers --on v5e-1 --on v5e-8 --batch 8 --freeze first")
    assert rows["v5e-8"]["problem"].endswith("micro-batches (2) = 16; use --batch 16 or --accumulate 1")
    row = rows["v5e-1"]
    assert row["fits"] is True and row["micro_batches"] == 2 and row["floor_by"] == "memory"
    moved_bytes = 4 * (1024**2 + 2 * 1024)
    assert row["floor_seconds"] == pytest.approx(moved_bytes / catalog.find("v5e-1").generation.bandwidth, rel=1e-3)


def test_program_is_lowered_without_libtpu(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['libtpu'] = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    words = "plan gpt2-tiny --data fake --layers 2 --context 128 --on v5e-8 --accumulate 3 --json"
    done = subprocess.run([PROGRAM, *words.split()], cwd=tmp_path, capture_output=True, text=True, check=True)
    [row] = json.loads(done.stdout)["rows"]
    assert row["fits"] == row["hbm_used_bytes"] == "unknown"
    assert row["model_flops"] > 0 and row["sharding"] == "replicate"
    assert row["micro_batches"] == 3 and row["batch"] == 3 * row["micro_batch"] * row["devices"]
    assert "libtpu, the TPU compiler, is not installed: whether it fits, its largest" in row["problem"]
    assert "pip install 'tpuswarm[plan]'" in done.stderr


def drawn(width, *renderables):
    console = Console(width=width, file=StringIO())
    console.print(*renderables)
    return console.file.getvalue()


def test_table_shows_finished_and_running_rows():
    row = Row(catalog.find("v3-8"), Found(None, problem="the compiler was stopped after 6 s"))
    text = drawn(200, table("a recipe", [("v3-8", row, ""), ("v5e-8", None, "8 rows per device fit")]))
    assert "v3-8: unknown: the compiler was stopped after 6 s" in text and "v5e-8: 8 rows per device fit" in text


def test_terminal_of_80_columns_holds_every_figure():
    v5p, gib = catalog.find("v5p-12288"), 2**30
    program = Program(
        batch=98_304, micro_batch=16, micro_batches=1, sharding="replicate", remat="none", why="", precision="bf16",
        attention="splash", tokens_per_row=1024, model_flops=10**18, least_flops=10**18, flops_unknown=(),
        state_bytes=24 * gib, moved_bytes=48 * gib, row_bytes=2048, exchanged=1_558_000_000, outer="nesterov",
        averaged=False,
    )  # fmt: skip
    found = Found(True, program, 30 * gib, 55 * gib, gib // 4, 18, hazards=())
    row, small_row = (Row(slice_, found, 10_000_000_000) for slice_ in (v5p, catalog.find("v3-8")))
    swarm, small_swarm = estimate(row, 200), estimate(small_row, 2)
    text = drawn(80, table("a recipe", [(v5p.name, row, "")]), *tables([swarm, small_swarm]))
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines())
    assert len(small_swarm.holders) == 4
    [far] = [bill for bill in swarm.bills if bill.relation == "other continent"]
    figures = ["98,304", "85.25", "95.74", "us-central1", short(swarm.traffic.data / gib), str(swarm.head.cores)]
    figures += [f"{short(200 * far.exchange)} + data", *(holder.name.split()[-1] for holder in small_swarm.holders)]
    assert not [figure for figure in figures if figure not in text]


@pytest.mark.parametrize(
    ("value", "three", "two"),
    [(0.0271, "0.0271", "0.027"), (9.96, "9.96", "10"), (99.4, "99.4", "99"), (269_701, "270,000", "270,000"),
     (999_999, "1M", "1M"), (7_388_466, "7.39M", "7.4M"), (177e6, "177M", "180M"), (4_178_781_062, "4.18B", "4.2B")],
)  # fmt: skip
def test_numbers_are_rounded_to_significant_digits(value, three, two):
    assert (short(value), short(value, 2)) == (three, two)
