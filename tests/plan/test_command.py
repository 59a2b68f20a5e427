"""`tpuswarm plan` as it is typed, with the real TPU compiler on small programs."""

import json
from io import StringIO

import pytest
from rich.console import Console

from tests import processes
from tpuswarm import catalog
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

def loss_of(model):
    def loss(params, batch, key):
        return jnp.mean(model(batch["x"] @ params["w"]))
    return supervised(
        lambda key: {"w": jnp.zeros((128, 128))}, loss, optax.sgd(0.1), {"x": np.ones((8, 128), np.float32)}
    )

def prints(h):
    jax.debug.print("{h}", h=h.sum())
    return h

def halves():
    return supervised(
        lambda key: {"w": jnp.zeros((128, 128))},
        lambda params, batch, key: jnp.mean(batch["x"] @ params["w"]),
        optax.sgd(0.1),
        {"x": np.ones((8, 128), np.float32)},
        defaults={"accumulate": 2},
    )

def two_layers():
    return supervised(
        lambda key: {"first": jnp.zeros((1024, 1024)), "second": jnp.zeros(1024)},
        lambda params, batch, key: jnp.mean(batch["x"] @ params["first"] @ params["second"]),
        optax.sgd(0.1),
        {"x": np.ones((8, 1024), np.float32)},
    )

def talks(): return loss_of(prints)

def refused(): return loss_of(lambda h: jnp.linalg.eigvals(h.astype(jnp.float32)).real)

def evaluated(refused: bool = False):
    def loss(params, batch, key):
        h = batch["x"] @ params["w"]
        if key is None and refused:
            h = jnp.linalg.eigvals(h.astype(jnp.float32)).real
        elif key is None:
            h = jnp.sort(jnp.tile(h.astype(jnp.float32), (4096, 32)), axis=0)
        return jnp.mean(h)
    x = {"x": np.ones((8, 128), np.float32)}
    return supervised(lambda key: {"w": jnp.zeros((128, 128))}, loss, optax.sgd(0.1), x)

def bad_trace():
    def loss(params, batch, key):
        return jnp.mean(batch["x"] @ jnp.ones((7, 7)))
    return supervised(lambda key: {"w": jnp.zeros(3)}, loss, optax.sgd(0.1), {"x": np.ones((8, 3), np.float32)})
"""


def line_of(words: str) -> int:
    return next(number for number, line in enumerate(RECIPE.splitlines(), 1) if words in line)


@pytest.fixture
def call(monkeypatch, typed, tmp_path):
    """Run a command in this process, in an empty directory with my_recipe.py; (code, out, err)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my_recipe.py").write_text(RECIPE)

    return lambda line: typed(*line.split())


USUAL = "plan gpt2-tiny --data fake --layers 2 --context 128 --batch 64 --json"


@pytest.mark.tpu_compiler
def test_gpt2_trains_on_every_generation(call):
    code, out, _ = call(USUAL)
    assert code == 0 and list(fitting(out)) == ["v2-8", "v3-8", "v4-8", "v5e-8", "v5p-8", "v6e-8", "tpu7x-8"]


def test_gpt2_trains_with_each_form_of_attention(call):
    """Its layers are recomputed on the oldest TPU, and not on a newer one."""
    line = f"{USUAL} --on v2-8 --on v6e-8"
    code, out, err = call(line)
    assert code == 0 and list(fitting(out)) == ["v2-8", "v6e-8"]
    assert "v6e-8: fits: 8 rows per device" in err

    again = call(line)
    assert (again[0], again[1]) == (0, out)  # times of compilation included: nothing was compiled


def fitting(out: str) -> dict[str, dict]:
    """Rows by TPU, all of which have to fit, with figures that agree."""
    rows = {row["accelerator"]: row for row in json.loads(out)["rows"]}
    assert {row["fits"] for row in rows.values()} == {True}
    for name, row in rows.items():
        assert row["hbm_used_bytes"] == sum(row["memory"].values()) < row["hbm_bytes"]
        assert row["batch"] == 64 == row["micro_batch"] * catalog.find(name).devices
        assert row["precision"] == "bf16" and row["sharding"] == "replicate"
    assert {name for name, row in rows.items() if row["remat"] != "none"} == rows.keys() & {"v2-8", "v3-8"}
    flops = [row["model_flops"] for row in rows.values()]
    assert max(flops) < 1.001 * min(flops)  # in whatever form the attention is computed
    return rows


def test_the_largest_micro_batch_fits_and_the_next_one_was_refused(call):
    code, out, err = call("plan my_recipe.py:wide --on v5litepod-1 --json")
    [row] = json.loads(out)["rows"]
    assert code == 0 and row["accelerator"] == "v5e-1" and row["fits"] is True
    bytes_a_row = 4 * 16384 * 4  # while training four batches are on a device
    assert 0.8 < row["micro_batch"] * bytes_a_row / row["hbm_bytes"] <= 1
    assert row["hbm_bytes"] < row["micro_batch_too_large"] * bytes_a_row * 1.02
    assert row["micro_batch"] < row["micro_batch_too_large"] <= row["micro_batch"] * 1.125
    assert f"v5e-1: {row['micro_batch_too_large']} rows per device are too many" in err


def test_hazards_have_the_line_of_the_recipe(call):
    code, out, _ = call("plan my_recipe.py:talks --on v5e-1 --batch 128")
    assert code == 0
    assert f"my_recipe.py:{line_of('debug.print')})" in " ".join(out.split()).split("v5e-1: hazard: ")[1]

    code, out, _ = call("plan my_recipe.py:refused --on v5e-1 --batch 128 --json")
    [row] = json.loads(out)["rows"]
    assert code == 0 and row["fits"] is False and "the compiler refuses my_recipe for TPU v5" in row["problem"]
    [hazard] = row["hazards"]
    assert hazard["kind"] == "refused" and hazard["file"].endswith("my_recipe.py")
    assert hazard["line"] == line_of("eigvals")


def test_an_evaluation_that_does_not_fit_or_is_refused_is_a_hazard(call):
    """The step fits: only a compilation of the evaluation can tell."""
    code, out, _ = call("plan my_recipe.py:evaluated --on v5e-1 --batch 1024 --json")
    [row] = json.loads(out)["rows"]
    assert code == 0 and row["fits"] is True and row["compilations"] == 2
    [hazard] = [each for each in row["hazards"] if each["kind"] == "evaluation"]
    assert "it trains, but its evaluation of 1024 rows per device needs " in hazard["sentence"]
    assert hazard["sentence"].endswith(" available: use --eval-batch")

    code, out, _ = call("plan my_recipe.py:evaluated --on v5e-1 --batch 128 --refused true --json")
    [row] = json.loads(out)["rows"]
    assert code == 0 and row["fits"] is True
    [hazard] = [each for each in row["hazards"] if each["kind"] == "refused"]
    assert hazard["sentence"].startswith("in its evaluation the compiler refuses it: ")
    assert hazard["line"] == line_of("h = jnp.linalg.eigvals")


def test_what_fits_nowhere_says_by_how_much_and_what_would(call):
    code, out, err = call("plan gpt2-1558m --data fake --layers 800 --on v2-8 --batch 8")
    assert code == 0 and " no " in out
    assert err.splitlines()[0] == "v2-8: compiling" and err.splitlines()[1].startswith("v2-8: too large: sharded: ")
    sentence = " ".join(out.split()).split("v2-8: does not fit: ")[1]
    assert "even its smallest form (sharded: " in sentence and "layers recomputed) needs " in sentence
    assert (
        "GiB per device" in sentence and "more than the 7.48 available" in sentence and "of it is the state" in sentence
    )
    assert "chips with more memory (v4, v5p, v6e, tpu7x; estimate): no slice of these has enough" in sentence
    _, out, _ = call("plan gpt2-1558m --data fake --layers 800 --on v2-8 --batch 8 --json")
    [row] = json.loads(out)["rows"]
    assert row["fits"] is False and row["hbm_used_bytes"] == "unknown" and "needs" in row["problem"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpt2-tiny --on v9-8", "unknown TPU 'v9-8': "),
        ("gpt2-tiny --on v5lite-8", "did you mean v5litepod-8 (also called v5e-8, "),
        ("gpt2-tiny --on v4:3x3x3", "v4:3x3x3: the catalogue has no v4 with topology 3x3x3; it has "),
        ("gpt2-tini --on v5e-1", "unknown recipe 'gpt2-tini'; did you mean gpt2-tiny?"),
        ("missing.py:Recipe --on v5e-1", "there is no recipe file missing.py"),
        ("my_recipe.py:wyde --on v5e-1", "my_recipe.py has no wyde; did you mean wide?"),
        ("my_recipe.py:wide --on v5e-1 --widht 3", "wide has no option widht; did you mean width?"),
        ("my_recipe.py:bad_trace --on v5e-1", "the loss of my_recipe fails: TypeError: dot_general"),
        ("gpt2-tiny --on v5e-8 --batch 12", "a batch of 12 rows does not divide evenly over devices (8)"),
        ("gpt2-tiny --on v5e-8 --batch 12", "= 8; use --batch 16\n"),
        ("gpt2-tiny --on v5e-1 --members 0", "members must be at least 1, not 0"),
        ("gpt2-tiny --on v5e-1 --wrong", "see `tpuswarm plan --help`"),
        ("gpt2-tiny --on v5e-1 --batch many", "batch is a number such as 500, 20K or 10M, not 'many'"),
        ("gpt2-tiny --on v5e-1 --precision bf61 --data fake", "precision is bf16, f32 or highest, not 'bf61'"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_sentence(call, line, words):
    code, out, err = call(f"plan {line}")
    assert code == 2 and out == ""
    assert words in err and err.count("error: ") == 1 and "Traceback" not in err
    if "bad_trace" in line:
        assert f"my_recipe.py:{line_of('jnp.ones((7, 7))')})" in err


def test_speed_price_and_a_swarm_of_them(call):
    line = "plan my_recipe.py:talks --on v5e-1 --on v6e-1 --batch 4096 --tokens 10B --members 20"
    code, out, _ = call(f"{line} --json")
    rows = json.loads(out)["rows"]
    assert code == 0
    for row in rows:
        chip = catalog.find(row["accelerator"]).generation
        assert row["model_flops"] == 2 * 2 * 4096 * 128 * 128  # forward, and backward to the weights
        compute = row["model_flops"] / chip.peak_bf16
        assert row["floor_seconds"] == pytest.approx(max(compute, 2 * row["state_bytes"] / chip.bandwidth))
        assert row["floor_seconds"] <= row["step_seconds"]["low"] < row["step_seconds"]["high"]
        rate = catalog.find(row["accelerator"]).price()
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

    code, out, _ = call(f"{line} --free")
    assert code == 0 and "a swarm of 20 members (estimate)" in out and "10,000,000,000 rows (estimate)" in out
    _, out, _ = call(f"{line} --free --json")
    free = json.loads(out)["rows"][0]
    assert free["dollars"]["on_demand"] == {"low": 0, "high": 0} == free["dollars"]["spot"]
    assert free["swarm"]["traffic_dollars_a_day"] == rows[0]["swarm"]["traffic_dollars_a_day"]


FILE = """\
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
batch = 4096
tokens = 1_000_000
[train.options]
width = 512
"""


def test_a_file_names_the_recipe_its_batch_and_the_tpus(call, tmp_path):
    (tmp_path / "swarm.toml").write_text(FILE)
    code, out, _ = call("plan swarm.toml --json")
    found = json.loads(out)
    assert code == 0 and found["asked"]["options"] == {"width": "512"}
    rows = {row["accelerator"]: row for row in found["rows"]}
    assert {name: (row["batch"], row["tokens"], row["swarm"]["members"]) for name, row in rows.items()} == {
        "v5e-1": (4096, 1_000_000, 3), "v6e-1": (4096, 1_000_000, 20),
    }  # fmt: skip
    kinds = [(each["accelerator"], each["how"], each["count"]) for each in found["together"]["groups"]]
    assert kinds == [("v5e-1", "spot", 3), ("v6e-1", "spot", 4), ("v6e-1", "spot", 16)]  # a grant covers four
    assert 0 < found["together"]["dollars"]["low"] < found["together"]["dollars"]["high"]
    code, out, _ = call("plan swarm.toml")
    assert "together, with simulated preemptions (estimate)" in out
    assert "a swarm of 3 members" in out and "a swarm of 20 members" in out and "add up" in out


def test_what_grants_cover_is_planned_as_one_free_swarm(call, tmp_path):
    (tmp_path / "swarm.toml").write_text(FILE)
    code, out, _ = call("plan my_recipe.py:wide --width 512 --batch 4096 --tokens 1M --mine --json")
    [row] = json.loads(out)["rows"]
    assert code == 0 and (row["accelerator"], row["swarm"]["members"]) == ("v6e-1", 4)
    assert row["dollars"]["spot"] == {"low": 0, "high": 0}
    _, out, _ = call("plan my_recipe.py:wide --width 512 --batch 4096 --mine")
    assert "granted: 4 v6e-1 (spot) in us-east1-d, until 2099-01-31" in out
    assert "42 losses in 677 h" in " ".join(out.split()) and "rows until the last grant ends on 2099-01-31" in out


@pytest.mark.parametrize(
    ("line", "old", "new", "words"),
    [
        ("swarm.toml", "[train]", "[training]", "has no key training; did you mean train?"),
        (
            "swarm.toml",
            "width = 512",
            "widht = 512",
            "swarm.toml, line 23: train.options.widht: my_recipe.py:wide has no",
        ),
        (
            "swarm.toml",
            'recipe = "my_recipe.py:wide"',
            'recipe = "gpt3"',
            "line 19: train.recipe: unknown recipe 'gpt3'",
        ),
        ("swarm.toml --on v5e-1", "", "", "swarm.toml names the TPUs: leave --on out, or name a recipe"),
        ("swarm.toml --members 3", "", "", "here the file says how many there are"),
        ("gpt2-tiny --mine --on v5e-1", "", "", "--on and --mine exclude each other"),
        ("gpt2-tiny --mine", "2099", "2020", "has no [[grant]] that still holds"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(call, tmp_path, line, old, new, words):
    (tmp_path / "swarm.toml").write_text(FILE.replace(old, new))
    code, out, err = call(f"plan {line}")
    assert (code, out) == (2, "") and words in err and err.count("error: ") == 1


def test_a_slice_that_the_batch_does_not_fit_into_leaves_the_others(call):
    code, out, _ = call("plan my_recipe.py:wide --on v5e-1 --on v5e-8 --batch 4 --json")
    one, eight = json.loads(out)["rows"]
    assert code == 0 and one["fits"] is True
    assert eight["fits"] == "unknown" and "does not divide evenly over devices (8)" in eight["problem"]

    code, out, _ = call("plan my_recipe.py:wide --on v5e-1 --on v5e-8 --batch 16 --accumulate 4 --json")
    one, eight = json.loads(out)["rows"]
    assert code == 0 and one["fits"] is True and one["micro_batches"] == 4
    assert eight["problem"].endswith("micro-batches (4) = 32; use --batch 32 or --accumulate 2")

    code, out, _ = call("plan my_recipe.py:halves --on v5e-1 --on v5e-8 --batch 8 --json")
    one, eight = json.loads(out)["rows"]
    assert code == 0 and one["fits"] is True and one["micro_batches"] == 2
    assert eight["problem"].endswith("micro-batches (2) = 16; use --batch 16 or --accumulate 1")


def test_what_is_frozen_is_read_and_not_written(call):
    code, out, _ = call("plan my_recipe.py:two_layers --on v5e-1 --batch 1 --freeze first --json")
    [row] = json.loads(out)["rows"]
    moved = 4 * (1024**2 + 2 * 1024)
    assert code == 0 and row["floor_by"] == "memory"
    assert row["floor_seconds"] == pytest.approx(moved / catalog.find("v5e-1").generation.bandwidth, rel=1e-3)


def test_without_libtpu_the_program_is_lowered_and_the_rest_is_unknown(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['libtpu'] = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    words = ["plan", "gpt2-tiny", "--data", "fake", "--context", "128", "--on", "v5e-8", "--on", "v3-8"]
    words += ["--accumulate", "3", "--json"]
    out, err = processes.run(words, tmp_path)
    rows = json.loads(out)["rows"]
    assert [row["fits"] for row in rows] == ["unknown", "unknown"]
    for row in rows:
        assert row["hbm_used_bytes"] == "unknown" and row["model_flops"] > 0 and row["sharding"] == "replicate"
        assert row["micro_batches"] == 3 and row["batch"] == 3 * row["micro_batch"] * row["devices"]
        assert "libtpu, the TPU compiler, is not installed: whether it fits, its largest" in row["problem"]
    assert "pip install 'tpuswarm[plan]'" in err


def test_the_table_shows_what_is_known_so_far():
    v3, v5e = catalog.find("v3-8"), catalog.find("v5e-8")
    row = Row(v3, Found(None, problem="the compiler was stopped after 6 s"))
    console = Console(width=200, file=StringIO())
    console.print(table("a recipe", [("v3-8", row, ""), ("v5e-8", None, "8 rows per device fit")]))
    text = console.file.getvalue()
    assert "v3-8: unknown: the compiler was stopped after 6 s" in text
    assert f"{v5e.name}: 8 rows per device fit" in text


def test_a_terminal_of_80_columns_holds_every_figure():
    v5p, gib = catalog.find("v5p-12288"), 2**30
    program = Program(
        batch=98_304, micro_batch=16, micro_batches=1, sharding="replicate", remat="none", why="", precision="bf16",
        attention="splash", tokens_per_row=1024, model_flops=10**18, least_flops=10**18, flops_unknown=(),
        state_bytes=24 * gib, moved_bytes=48 * gib, row_bytes=2048, exchanged=1_558_000_000, outer="nesterov",
        averaged=False,
    )  # fmt: skip
    found = Found(True, program, 30 * gib, 55 * gib, gib // 4, 18, hazards=())
    row, small = (Row(each, found, 10_000_000_000) for each in (v5p, catalog.find("v3-8")))
    swarm, few = estimate(row, 200), estimate(small, 2)
    console = Console(width=80, file=StringIO())
    console.print(table("a recipe", [(v5p.name, row, "")]), *tables([swarm, few]))
    text = console.file.getvalue()
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines())
    assert len(few.holders) == 4
    [far] = [each for each in swarm.bills if each.relation == "other continent"]
    for shown in (
        *(each.name.split()[-1] for each in few.holders),
        "98,304",
        "85.25",
        "95.74",
        "us-central1",
        short(swarm.traffic.data / gib),
        f"{short(200 * far.exchange)} + data",
        str(swarm.head.cores),
    ):
        assert shown in text, shown


@pytest.mark.parametrize(
    ("value", "three", "two"),
    [(0.0271, "0.0271", "0.027"), (9.96, "9.96", "10"), (99.4, "99.4", "99"), (269_701, "270,000", "270,000"),
     (999_999, "1M", "1M"), (7_388_466, "7.39M", "7.4M"), (177e6, "177M", "180M"), (4_178_781_062, "4.18B", "4.2B")],
)  # fmt: skip
def test_numbers_have_as_many_digits_as_they_mean(value, three, two):
    assert (short(value), short(value, 2)) == (three, two)
