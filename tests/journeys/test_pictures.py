"""A StyleGAN2 from its data to a grid of pictures, by commands."""

import json

import jax
import numpy as np
import pytest
from matplotlib.image import imread
from PIL import Image

from tests.processes import finish, start
from tpuswarm import Trainer, load
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.run.directory import EVENTS, read_rows

pytestmark = pytest.mark.slow
TINY = "--resolution 8 --latent 4 --mapping 1 --channels 4 --most-channels 4 --group 2 --batch 8"


@pytest.mark.long
def test_evaluate_sample_and_project_digits(call, tmp_path):
    run, out = tmp_path / "digits", tmp_path / "grid.png"
    recipe = StyleGAN2(resolution=8, latent=4, mapping=1, channels=4, most_channels=4, group=2)
    Trainer(devices=1).fit(recipe, steps=2, batch=8, run=run)
    code, printed, err = call(f"evaluate {run} --json")
    assert code == 0, err
    measured = json.loads(printed)
    assert measured["rows"] == 179 and {"loss", "d_loss", "g_loss"} <= measured.keys()
    assert (measured["made"], measured["reference"], measured["held_out"]) == (1000, 1000, 179)
    assert measured["frechet_distance"] > 0 and 0 <= measured["precision"] <= 1
    (grid,) = (run / "pictures").iterdir()
    assert grid.name == "00000002.png" and imread(grid).shape[:2] == (64, 64)
    assert "What it makes" in (run / "report.html").read_text()
    code, printed, err = call(f"sample {run} --grid 2x3 --truncation 0.7 --out {out}")
    assert (code, printed) == (0, f"{run} at step 2: 6 pictures in {out}\n"), err
    assert imread(out).shape[:2] == (16, 24)
    code, printed, err = call(f"sample {run} --interpolate 4 --out {tmp_path / 'walk.gif'}")
    assert (code, printed) == (0, f"{run} at step 2: a film of 4 frames in {tmp_path / 'walk.gif'}\n"), err
    with Image.open(tmp_path / "walk.gif") as film:
        assert (film.n_frames, film.size) == (4, (8, 8))
    code, printed, err = call(f"project {run} {out} --steps 3 --out {tmp_path / 'found.png'}")
    assert code == 0 and printed.startswith(f"{tmp_path / 'found.png'}: {out} beside the picture of {run}, "), err
    assert imread(tmp_path / "found.png").shape[:2] == (8, 16) and np.load(tmp_path / "found.npy").shape == (4,)
    (tmp_path / "torn.png").write_bytes(out.read_bytes()[:100])
    code, _, err = call(f"project {run} {tmp_path / 'torn.png'}")
    assert code == 2 and "torn.png is no picture that can be read" in " ".join(err.split())
    larger = TINY.replace("--resolution 8", "--resolution 16")
    code, _, err = call(f"train stylegan2-32 --data digits {larger} --devices 1 --run {run}")
    assert code == 2 and "resolution was 8, now 16" in err
    code, _, err = call(f"sample {run}")
    assert code == 2 and "makes pictures, not text; add --grid 8x8" in err


OWN = """
import jax, jax.numpy as jnp, numpy as np
from tests.train import toy
from tpuswarm import Recipe


class Painter(Recipe):
    name = "painter"
    program = staticmethod(toy.recipe().program)
    data = staticmethod(toy.recipe().data)

    def grids(self, state, rows, columns, *, truncation, seed, count=1):
        yield np.full((8 * rows, 8 * columns, 3), 7, np.uint8)


class Reader(Painter):
    def load_shared(self, place, like):
        return jax.tree.map(lambda leaf: jax.device_put(jnp.full(leaf.shape, 2, leaf.dtype), leaf.sharding), like)
"""


def test_own_recipe_may_have_only_some_optional_methods(call, tmp_path):
    """`grids` without what finds codes; `load_shared` without what gives options."""
    (tmp_path / "own.py").write_text(OWN)
    run, out = tmp_path / "run", tmp_path / "grid.png"
    few = "--steps 1 --batch 8 --devices 1"
    code, _, err = call(f"train {tmp_path / 'own.py'}:Reader --init-from some:where {few} --run {run}")
    assert code == 0, err
    assert load(run)["params"]["unused"] == pytest.approx(2, rel=0.1)
    code, _, err = call(f"sample {run} --grid 1x2 --out {out}")
    assert code == 0 and imread(out).shape[:2] == (8, 16), err
    code, _, err = call(f"project {run} {out}")
    assert code == 2 and "painter cannot find the code of a picture" in err
    code, _, err = call(f"train {tmp_path / 'own.py'}:Painter --init-from some:where {few} --run {tmp_path / 'none'}")
    assert code == 2 and "painter can only start from one" in " ".join(err.split())


HOOKS = """
import json
import jax, jax.numpy as jnp, numpy as np
from tpuswarm import Every, Stop
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2


def weights(step):
    size = sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(step.state.average))
    return {"size": size, "at": step.row["version"]}

def text(step):
    return f"step {step.row['step']} has eval_loss {step.row['eval_loss']:.3f}"

def picture(step):
    return np.full((4, 6, 3), 7, np.uint8)

def fails(step):
    raise KeyError("colour")


class Printed:
    def __init__(self):
        self.file = open("rows.jsonl", "a")

    def write(self, row):
        self.file.write(json.dumps(row) + "\\n")

    def close(self):
        self.file.write("closed")
        self.file.close()


class Mine(StyleGAN2):
    def hooks(self):
        hooks = fails, weights, text, picture, lambda step: Stop("enough")
        return [Every("evaluation", hook) for hook in hooks]

    def loggers(self):
        return [Printed()]
"""


@pytest.mark.long
def test_swarm_draws_its_commits_and_uses_the_hooks_and_loggers_of_its_recipe(call, tmp_path):
    """All hooks are called at evaluations, though one of them fails."""
    (tmp_path / "mine.py").write_text(HOOKS)
    run = tmp_path / "swarm"
    words = f"train mine.py:Mine --data digits {TINY} --steps 8 --members 1 --cycle 2 --eval-every 4 --run {run}"
    _, err = finish(start(words.split(), tmp_path))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "eval_loss" in row]
    evaluated, last = [row["version"] for row in evaluations], evaluations[-1]
    assert not any("picture" in row for row in rows)
    drawn = {f"{version:08d}{suffix}.png" for version in evaluated for suffix in ("", "-3")}
    assert {path.name for path in (run / "pictures").iterdir()} == drawn
    np.testing.assert_array_equal(imread(run / "pictures" / f"{last['version']:08d}-3.png")[..., :3] * 255, 7)
    report = (run / "report.html").read_text()
    assert f"commit {evaluated[-1]}</h3><img" in report and "step 8 has eval_loss" in report

    assert all(row["eval_size"] > 0 and row["eval_at"] == row["version"] for row in evaluations)
    texts = {row["text"] for row in read_rows(run / EVENTS) if row["event"] == "sample"}
    assert last["tokens"] == 64 and f"step 8 has eval_loss {last['eval_loss']:.3f}" in texts
    assert "a hook returned Stop(reason='enough'), which a swarm ignores" in texts
    assert f"step 8 has eval_loss {last['eval_loss']:.3f}" in err and "a hook failed at step" in err
    assert any("a hook failed at step 8: KeyError: 'colour' (" in text and "mine.py:" in text for text in texts)
    *logged, end = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert end == "closed" and len(logged) == len(rows)

    found, ledger = load(run), Ledger(Store(run))
    assert all(ledger.record(version).kept is not None for version in ledger.versions())
    both = (jax.tree.leaves(found[name]["generator"]) for name in ("params", "ema"))
    assert any((trained != average).any() for trained, average in zip(*both, strict=True))
    code, printed, err = call(f"evaluate {run} --json")
    assert code == 0 and json.loads(printed)["loss"] == pytest.approx(last["eval_loss"], rel=1e-4), err  # the average's
    code, printed, _ = call(f"ledger verify {run}")
    assert code == 0


def test_text_model_has_no_features(call, finished_run):
    code, _, err = call(f"evaluate {finished_run.run} --features inception.py:features")
    assert code == 2 and "is measured by its loss alone: leave --features out" in " ".join(err.split())
