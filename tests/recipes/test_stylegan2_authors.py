"""StyleGAN2's steps equal those of its authors' code; stylegan2_authors.py recorded the figures."""

import json
from collections import defaultdict, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.recipes import stylegan2_authors as authors
from tpuswarm.recipes.stylegan2 import discriminator, generator
from tpuswarm.recipes.stylegan2.layers import Form
from tpuswarm.recipes.stylegan2.program import pixels
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.recipe import Clock, Options

pytestmark = pytest.mark.long
FIGURES = json.loads(authors.FIGURES.read_text())
RECIPE = StyleGAN2(**authors.SHAPE, lr=authors.LR, r1=authors.R1, average=authors.AVERAGE, adapt=False)


def require_same(tree, figures, within):
    """Compare the norm of each array, and its product with random numbers, which is about as large as the norm."""
    arrays = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
    assert arrays.keys() == figures.keys()
    for path, figure in figures.items():
        tolerance = within * figure[0] + 1e-12
        assert authors.summary(path, arrays[path]) == pytest.approx(figure, rel=0, abs=tolerance), path


def of_both(get):
    return {network: get(network) for network in ("generator", "discriminator")}


@pytest.fixture(scope="module")
def networks():
    def numbered(name, network):
        shapes = jax.eval_shape(lambda key: network.init(key, RECIPE.config), jax.random.key(0))
        paths = [f"{name}/{path}" for path in leaf_paths(shapes)]
        leaves, tree = jax.tree.flatten(shapes)
        arrays = [authors.parameter(path, *leaf.shape) for path, leaf in zip(paths, leaves, strict=True)]
        return jax.tree.unflatten(tree, arrays)

    w_mean = 0.3 * authors.numbers("w_mean", RECIPE.config.latent)
    return {
        "generator": numbered("generator", generator),
        "discriminator": numbered("discriminator", discriminator),
        "w_mean": w_mean,
    }


@pytest.fixture(scope="module")
def steps(networks):
    """The state after each step, and its metrics, with the numbers of the figures in the place of random ones."""
    program = RECIPE.program(Options())
    queues = defaultdict(deque)

    def step(state, rows, clock, drawn):
        for kind, arrays in drawn.items():
            queues[kind].extend(arrays)
        return program.step(state, rows, clock)

    def draws(step):
        phases = authors.PHASES
        cuts = [authors.cut(step, phase) for phase in phases]
        return {
            "codes": [authors.codes(step, phase) for phase in phases],
            "noise": [authors.noise(step, phase) for phase in phases],
            "path noise": [authors.path_noise(step)],
            "cut": [np.int32(cut) for cut in cuts],
            "mixed": [np.bool_(cut < authors.LAYERS) for cut in cuts],
        }

    def normal(key, shape):
        drawn = queues[{2: "noise", 3: "codes", 4: "path noise"}[len(shape)]].popleft()
        assert drawn.shape == shape
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        state = program.init(jax.random.key(0), jax.tree.map(jnp.asarray, networks))
        state.seen["path_mean"] = jnp.float32(authors.PATH_MEAN)
        patch.setattr(jax.random, "normal", normal)
        patch.setattr(jax.random, "randint", lambda *_: queues["cut"].popleft())
        patch.setattr(jax.random, "bernoulli", lambda *_: queues["mixed"].popleft())
        compiled, found = jax.jit(step), []
        for number in range(authors.STEPS):
            clock = Clock(jax.random.key(0), np.int32(number), np.float32(0))
            state, metrics = compiled(state, {"pictures": authors.pictures(number)}, clock, draws(number))
            found.append(jax.device_get((state, metrics)))
    assert not any(queues.values()), "the step draws what the authors draw"
    return found


def test_pictures_and_scores_are_the_authors(networks):
    config, expected = RECIPE.config, FIGURES["outputs"]

    def compute(networks, z, real):
        params = networks["generator"]
        w = generator.truncate(generator.to_w(params, z), networks["w_mean"], 0.7)
        made = generator.synthesize(params, generator.in_layers(w, config), None, config, Form())
        return made, discriminator.score(networks["discriminator"], pixels(real), config, Form())

    z, real = authors.codes(0, "generator")[:, 0], authors.pictures(0)
    made, scores = jax.jit(compute)(networks, z, real)
    require_same({"pictures": made}, {"pictures": expected["pictures"]}, 1e-5)
    np.testing.assert_allclose(made[:2, 5, 7].ravel(), expected["pixels"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scores, expected["scores"], rtol=1e-5, atol=1e-5)


def test_losses_and_regularisers_are_the_authors(steps):
    for (_, metrics), expected in zip(steps, FIGURES["steps"], strict=True):
        assert {name: float(metrics[name]) for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("step", authors.MOMENTS_AT)
@pytest.mark.parametrize("moment", ["mu", "nu"])
def test_gradients_are_the_authors(steps, step, moment):
    """Adam's first moment is the last gradient; the second averages all gradients so far."""
    state, _ = steps[step]
    ours = of_both(lambda network: getattr(getattr(state, f"{network}_opt")[0], moment))
    require_same(ours, FIGURES["moments"][f"{step}"][moment], 5e-5)


def test_parameters_after_five_steps_are_the_authors(steps):
    state, _ = steps[-1]
    require_same(of_both(lambda network: getattr(state, network)), FIGURES["parameters"], 2e-5)


def test_moving_averages_follow_as_the_authors_do(steps):
    state, _ = steps[-1]
    np.testing.assert_allclose(state.w_mean, FIGURES["w_mean"], rtol=1e-5, atol=1e-6)
    behind = jax.tree.map(np.subtract, state.generator, state.average)
    by_path = sorted(
        zip(leaf_paths(behind), jax.tree.leaves(behind), strict=True), key=lambda leaf: f"generator/{leaf[0]}"
    )
    flat = np.concatenate([leaf.ravel() for _, leaf in by_path])
    require_same({"behind": flat}, {"behind": FIGURES["behind"]}, 1e-3)  # small differences of large numbers
