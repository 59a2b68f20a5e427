"""Optimizers other than AdamW: those that need the loss, keep parameters or cannot work, and GPT-2's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import InputError, Weighted, supervised
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.recipe import Options
from tpuswarm.train.supervised_program import inference_params

RATE = 3e-3


def train(recipe, steps, **options):
    """Return the states before and after each step on the same batch, and the losses."""
    program, batch = recipe.program(Options(**options)), recipe.data("train").rows(0, 16)
    step, states, losses = jax.jit(program.step), [jax.jit(program.init)(jax.random.key(0))], []
    for index in range(steps):
        state, metrics = step(states[-1], batch, toy.clock(index, index / steps))
        states.append(state)
        losses.append(float(metrics["loss"]))
    return states, losses


def test_rate_that_follows_the_loss_falls_on_a_plateau():
    optimizer = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))
    states, _ = train(supervised(toy.init, toy.loss, optimizer, toy.data()), 9)
    assert float(optax.tree.get(states[-1].opt, "scale")) == pytest.approx(0.5**4)


def summed_loss(params, batch, key):
    loss, metrics = toy.loss(params, batch, key)
    return Weighted(loss * len(batch["y"]), len(batch["y"])), metrics


@pytest.mark.parametrize(("loss", "accumulate"), [(toy.loss, 1), (summed_loss, 4)])
def test_line_search_sees_the_loss_of_the_whole_batch(loss, accumulate):
    """L-BFGS solves a least-squares problem of 6 unknowns in a few steps."""
    recipe = supervised(toy.init, loss, optax.lbfgs(), toy.data())
    _, losses = train(recipe, 12, accumulate=accumulate, freeze="unused")
    assert losses[-1] < 1e-6 * losses[0] and losses == sorted(losses, reverse=True)


ASCENT = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
STEPS = 5


def train_by_hand(optimizer, params, extra_args=lambda loss: {}):
    """Return the parameters after STEPS steps on the batch of `train`, in a loop as optax documents it."""
    batch, state = toy.recipe().data("train").rows(0, 16), optimizer.init(params)

    def loss(params):
        return toy.loss(params, batch, None)[0]

    for _ in range(STEPS):
        grads = jax.grad(loss)(getattr(params, "fast", params))
        updates, state = optimizer.update(grads, state, params, **extra_args(loss))
        params = optax.apply_updates(params, updates)
    return params


def train_supervised(optimizer, **options):
    recipe = supervised(toy.init, toy.loss, optimizer, toy.splits)
    return train(recipe, STEPS, **options)[0]


def assert_close(params, wanted):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5), params, wanted)


@pytest.mark.parametrize(
    ("optimizer", "extra_args"),
    [
        (optax.contrib.sam(optax.sgd(0.1), ASCENT), lambda loss: {}),
        (
            optax.contrib.sam(optax.sgd(0.1), ASCENT, opaque_mode=True),
            lambda loss: {"grad_fn": lambda params, _: jax.grad(loss)(params)},
        ),
        (optax.contrib.sophia(0.1), lambda loss: {"obj_fn": loss}),
        (optax.MultiSteps(optax.adam(0.1), 2), lambda loss: {}),
    ],
    ids=["sam", "opaque sam", "sophia", "MultiSteps"],
)
def test_optimizer_trains_as_in_the_loop_of_its_documentation(optimizer, extra_args):
    states = train_supervised(optimizer)
    assert_close(states[-1].params, train_by_hand(optimizer, states[0].params, extra_args))


def test_lookahead_trains_fast_parameters_and_evaluates_slow_ones():
    optimizer = optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.5)
    states = train_supervised(optimizer, freeze="unused")
    wanted = train_by_hand(optimizer, optax.LookaheadParams.init_synced(states[0].params))
    assert_close(states[-1].params, wanted.fast)
    assert_close(inference_params(states[-1]), wanted.slow)


def test_sam_is_evaluated_at_the_parameters_of_its_updates():
    """After an odd number of steps the parameters are those of the ascent."""
    states = train_supervised(optax.contrib.sam(optax.sgd(0.1), ASCENT))
    assert_close(inference_params(states[1]), states[0].params)
    assert_close(inference_params(states[2]), states[2].params)
    averaged = train_supervised(optax.contrib.sam(optax.sgd(0.1), ASCENT), ema=0.5)
    assert_close(averaged[1].ema, states[0].params)


def test_clip_holds_for_gradients_that_an_optimizer_computes():
    """The optimizer of SAM sees only the gradient at the ascended parameters, which `grad_fn` gives."""
    before, after = train_supervised(optax.contrib.sam(optax.sgd(1.0), ASCENT, opaque_mode=True), clip=0.1)[:2]
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, before.params, after.params))
    assert float(moved) == pytest.approx(0.1, rel=1e-4)


def test_sam_takes_its_arguments_inside_a_chain():
    sam = optax.contrib.sam(optax.sgd(0.1), ASCENT, opaque_mode=True)
    assert_close(train_supervised(optax.chain(optax.identity(), sam))[-1].params, train_supervised(sam)[-1].params)


def needs_temperature(updates, state, params=None, *, temperature):
    return updates, state


def fails(updates, state, params=None):
    raise ValueError("my own mistake")


EMPTY = optax.init_empty_state


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0), "dpsgd needs the gradient of each row"),
        (optax.GradientTransformationExtraArgs(EMPTY, needs_temperature), "optimizer fails.*'temperature'.*izers.py:"),
        (optax.GradientTransformation(EMPTY, fails), r"optimizer fails: ValueError: my own mistake \(.*izers.py:"),
        (optax.GradientTransformation(lambda params: {}["a"], fails), r"optimizer fails: KeyError: 'a' \(.*izers.py:"),
    ],
)
def test_optimizer_that_cannot_work_is_refused_by_name(optimizer, words):
    def vector_loss(params, batch, key):  # dpsgd would take the entries of its only parameter as rows
        return jnp.mean(batch["x"] @ params)

    with pytest.raises(InputError, match=words):
        train(supervised(lambda key: jnp.zeros(5), vector_loss, optimizer, toy.data()), 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rate, decay_mask: None, "returned a NoneType: return an optax.*izers.py:"),
        (lambda rate, decay_mask: optax.adam(rte=rate), "fails: TypeError.*rte.*izers.py:"),
    ],
)
def test_function_that_makes_no_optimizer_is_refused_with_its_line(make, words):
    with pytest.raises(InputError, match=r"optimizer\(learning_rate, decay_mask\) " + words):
        train(toy.recipe(make), 1)


def test_parameters_in_the_form_of_lookahead_are_refused_with_the_way_out():
    def init(key):
        return optax.LookaheadParams.init_synced(toy.init(key))

    with pytest.raises(InputError, match=r"init returned optax\.LookaheadParams: return the parameters"):
        train(supervised(init, toy.loss, optax.lookahead(optax.adam(0.1), 5, 0.5), toy.data()), 1)


def gpt2(optimizer, **options):
    shape = {"layers": 2, "heads": 1, "width": 32, "context": 8, "vocab": 128} | options
    return GPT2(data="fake", **shape, optimizer=optimizer, lr=RATE, warmup=0.0, weight_decay=0.0)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_gpt2_learns_with_other_optimizers_and_a_frozen_part(name):
    states, losses = train(gpt2(name), 12, freeze="wpe", decay="/w$", clip=1.0)
    assert losses[-1] < 0.93 * losses[0]
    before, after = (state.params for state in states[:2])
    np.testing.assert_array_equal(before["wpe"], states[-1].params["wpe"])
    # Muon's updates are orthogonal for each layer's matrix by itself, and of AdamW's size.
    for layer in range(2 * (name == "muon")):
        update = (after["blocks"]["mlp"]["fc"]["w"] - before["blocks"]["mlp"]["fc"]["w"])[layer] / RATE
        values = np.linalg.svd(np.asarray(update), compute_uv=False)
        assert np.allclose(values[:16] / (0.2 * np.sqrt(128)), 1.0, atol=0.35)  # of five iterations
        assert np.sqrt(np.mean(np.square(update))) == pytest.approx(0.2, rel=0.25)
        embedding = (after["wte"] - before["wte"]) / RATE
        assert np.abs(embedding).max() == pytest.approx(1 + 0.9 * 0.1 / 0.19, rel=1e-2)  # Adam's, with Nesterov


def abstract_state(recipe, **options):
    return jax.eval_shape(recipe.program(Options(**options)).init, jax.random.key(0))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_first_moments_in_bf16_take_half_the_bytes(name):
    recipe = gpt2(name, moments="bf16")
    state = abstract_state(recipe, freeze="wpe")
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.params)) - state.params["wpe"].size
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt) if leaf.dtype == jnp.bfloat16) == trained
    assert GPT2(**recipe.options()).options() == recipe.options() and recipe.options()["moments"] == "bf16"
    assert recipe.options().get("optimizer") == (None if name == "adamw" else name)
    assert "moments" not in gpt2(name).options()


def test_adafactor_and_muon_have_less_state_than_adamw():
    states = (abstract_state(gpt2(name, width=128)).opt for name in ("adamw", "muon", "adafactor"))
    adamw, muon, adafactor = (sum(leaf.size for leaf in jax.tree.leaves(state)) for state in states)
    assert adafactor < 0.05 * adamw and muon < 0.65 * adamw


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam"}, "unknown optimizer 'adam'; did you mean adamw"),
        ({"moments": "bf61"}, "unknown moments 'bf61'; did you mean bf16"),
        ({"optimizer": "adafactor", "moments": "bf16"}, "adafactor has no first moment"),
    ],
)
def test_unknown_optimizer_options_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        GPT2(data="fake", **options)
