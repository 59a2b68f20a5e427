"""One step of StyleGAN2: updates of two networks that learn against each other, losses and regularisers.

Sources: Karras et al. 2020 (1912.04958), section 3 and appendix B (lazy regularisation, path length), and 2020
(2006.06676), appendix C (the weight of R1, the moving average's half-life that grows with the run).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm.errors import InputError
from tpuswarm.recipes.stylegan2 import augment, discriminator, generator
from tpuswarm.recipes.stylegan2.config import Config
from tpuswarm.recipes.stylegan2.layers import Form, Params
from tpuswarm.train import paths
from tpuswarm.train.recipe import Average, Batch, Clock, Exchange, Metrics, Options, Parameter, Program

R1_INTERVAL_STEPS = 16
PATH_INTERVAL_STEPS = 4
PATH_WEIGHT = 2.0
PATH_MEAN_DECAY = 0.99
W_MEAN_DECAY = 0.995
"""For each batch of generated pictures."""
MIXING_PROBABILITY = 0.9
"""Share of batches with two codes for each picture."""
MAX_HALF_LIFE_SHARE = 0.05
"""The half-life of the generator's moving average is at most this share of the pictures so far."""
BETA2 = 0.99


def real_loss(score_B: jax.Array) -> jax.Array:
    """Logistic loss that rewards a `real` verdict (Goodfellow et al. 2014, the non-saturating form)."""
    return jax.nn.softplus(-score_B).mean()


def fake_loss(score_B: jax.Array) -> jax.Array:
    """Logistic loss that rewards a `fake` verdict."""
    return jax.nn.softplus(score_B).mean()


def r1_penalty(score: Callable[[jax.Array], jax.Array], x_BxHxWx3: jax.Array) -> jax.Array:
    """Mean squared gradient of the scores by the real pictures (Mescheder et al. 2018, 1801.04406, equation 9)."""
    slope = jax.grad(lambda x: score(x).sum())(x_BxHxWx3)
    return jnp.square(slope).sum((1, 2, 3)).mean()


def path_lengths(
    synthesize: Callable[[jax.Array], jax.Array], w_BxLxD: jax.Array, noise_BxHxWx3: jax.Array
) -> jax.Array:
    """Length_B of |J_w^T y| for a random picture y, a mean over layers (Karras et al. 2020, section 3.2).

    y is divided by the root of its pixels, so that a length does not depend on the resolution.
    """
    _, H, W, _ = noise_BxHxWx3.shape
    slope_BxLxD = jax.grad(lambda w: (synthesize(w) * noise_BxHxWx3).sum() * (H * W) ** -0.5)(w_BxLxD)
    return jnp.sqrt(jnp.square(slope_BxLxD).sum(-1).mean(-1) + 1e-12)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Two networks with an optimizer each; the result of training is `average`, the generator's moving average.

    w_mean: mean code w_D, for truncation. seen: scalars `path_mean` (length), `r1` (the newest), `signs` (moving mean
    of the signs of real scores over about ADJUST_INTERVAL_STEPS) and `strength` (of the augmentation).
    """

    generator: Params
    discriminator: Params
    average: Params
    generator_opt: Any
    discriminator_opt: Any
    w_mean: jax.Array
    seen: dict[str, jax.Array]


class StyleGAN2Program(Program):
    """Update the generator and the discriminator in each step, and apply the regularisers that are due."""

    def __init__(self, config: Config, options: Options, rate: float, r1: float | None, half_life: int, adapt: bool):
        options.require_only("precision", by="stylegan2")
        self._config, self._rate, self._r1, self._half_life, self._adapt = config, rate, r1, half_life, adapt
        self._precision = options.precision
        self._form = Form(half=options.precision == "bf16", folds=options.platform == "tpu")
        self._g_adam, self._d_adam = (_adam(rate, interval) for interval in (PATH_INTERVAL_STEPS, R1_INTERVAL_STEPS))

    def init(self, key: jax.Array, shared: Any = None) -> State:
        """Fresh networks, or `shared` ones; optimizers and moving average begin with them."""
        keys = jax.random.split(key, 2)
        shared = shared or {
            "generator": generator.init(keys[0], self._config),
            "discriminator": discriminator.init(keys[1], self._config),
            "w_mean": jnp.zeros((self._config.latent,), jnp.float32),
        }
        seen = {name: jnp.zeros((), jnp.float32) for name in ("path_mean", "r1", "signs", "strength")}
        return State(
            **shared,
            average=jax.tree.map(jnp.array, shared["generator"]),
            generator_opt=self._g_adam.init(shared["generator"]),
            discriminator_opt=self._d_adam.init(shared["discriminator"]),
            seen=seen,
        )

    def step(self, state: State, batch: Batch, clock: Clock) -> tuple[State, Metrics]:
        """Update the generator, then the discriminator, each with its regulariser if due; then the averages."""
        keys = jax.random.split(clock.key, 4)
        real = pixels(batch["pictures"])
        self._require_groups(len(real))
        with self._matmul_precision():
            state, g_loss = self._train_generator(state, len(real), keys[2])
            state = _every(
                PATH_INTERVAL_STEPS, clock.step, lambda now: self._regularise_generator(now, len(real), keys[3]), state
            )
            state, d_loss = self._train_discriminator(state, real, keys[0])
            state = _every(
                R1_INTERVAL_STEPS, clock.step, lambda now: self._regularise_discriminator(now, real, keys[1]), state
            )
        state = self._with_strength(state, clock.step, len(real))
        state = self._with_average(state, clock.step, len(real))
        shown = {name: state.seen[name] for name in ("path_mean", "r1", "strength")}
        return state, {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss, **shown}

    def evaluate(self, state: State, batch: Batch) -> Metrics:
        """Losses of both networks on held-out pictures and on the averaged generator's, from fixed codes.

        An incomplete last group is filled up with the first pictures; their scores there do not count.
        """
        pictures, group = batch["pictures"], self._config.group
        count = len(pictures)
        real = pixels(jnp.resize(pictures, (-(-count // group) * group, *pictures.shape[1:])))
        with self._matmul_precision():
            made = self.make(state.average, jax.random.normal(jax.random.key(0), (len(real), self._config.latent)))
            real_B, made_B = (self._score(state.discriminator, x)[:count] for x in (real, made))
        d_loss, g_loss = real_loss(real_B) + fake_loss(made_B), real_loss(made_B)
        return {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}

    def make(
        self, params: Params, z_BxD: jax.Array, w_mean: jax.Array | None = None, truncation: float | jax.Array = 1.0
    ) -> jax.Array:
        """Return pictures x_BxHxWx3 from codes z; noise depends only on the place in the batch."""
        w_BxD = generator.to_w(params, z_BxD)
        if w_mean is not None:
            w_BxD = generator.truncate(w_BxD, w_mean, truncation)
        return self.synthesize(params, w_BxD)

    def synthesize(self, params: Params, w_BxD: jax.Array) -> jax.Array:
        """Return pictures x_BxHxWx3 from codes w; noise depends only on the place in the batch."""
        return self._synthesize(params, generator.in_layers(w_BxD, self._config), jax.random.key(1))

    def batch_spec(self, size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Pictures as bytes."""
        side = self._config.resolution
        return {"pictures": jax.ShapeDtypeStruct((size, side, side, 3), np.dtype(np.uint8))}

    def exchange(self) -> Exchange:
        """Share both networks and the mean of w; each member has its own optimizers."""
        names = ("discriminator", "generator", "w_mean")
        return Exchange(
            lambda state: {name: getattr(state, name) for name in names},
            lambda state, shared: replace(state, **shared),
            Average(
                lambda state, shared: replace(state, average=shared["generator"]),
                lambda batch: self._half_life,
                MAX_HALF_LIFE_SHARE,
            ),
        )

    def parameters(self, state: State) -> list[Parameter]:
        """Return the parameters of both networks, and the mean of w as a statistic."""
        return [
            Parameter(path, False, False, "", statistic=path == "w_mean")
            for path in paths.leaf_paths(self.exchange().get(state))
        ]

    def _require_groups(self, count: int) -> None:
        group = self._config.group
        if count % group:
            raise InputError(
                f"a batch of {count} does not divide into the groups of {group} pictures over which minibatch "
                f"deviation is taken; use a --batch that is a multiple of {group}, or another --group"
            )

    def _train_discriminator(self, state: State, real: jax.Array, key: jax.Array) -> tuple[State, jax.Array]:
        keys = jax.random.split(key, 4)
        made, w_BxLxD = self._generate(state.generator, len(real), keys[0])
        state = _with_w_mean(state, w_BxLxD)
        strength = state.seen["strength"]

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            real_B = self._score(params, self._augmented(real, keys[1], strength))
            made_B = self._score(params, self._augmented(made, keys[2], strength))
            return real_loss(real_B) + fake_loss(made_B), jnp.sign(real_B).mean()

        (value, sign), grads = jax.value_and_grad(loss, has_aux=True)(state.discriminator)
        seen = state.seen | {
            "signs": state.seen["signs"] + (sign - state.seen["signs"]) / augment.ADJUST_INTERVAL_STEPS
        }
        return self._update_discriminator(replace(state, seen=seen), grads), value

    def _train_generator(self, state: State, count: int, key: jax.Array) -> tuple[State, jax.Array]:
        keys = jax.random.split(key, 2)

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            made, w_BxLxD = self._generate(params, count, keys[0])
            made = self._augmented(made, keys[1], state.seen["strength"])
            return real_loss(self._score(state.discriminator, made)), w_BxLxD

        (value, w_BxLxD), grads = jax.value_and_grad(loss, has_aux=True)(state.generator)
        return self._update_generator(_with_w_mean(state, w_BxLxD), grads), value

    def _regularise_discriminator(self, state: State, real: jax.Array, key: jax.Array) -> State:
        """Apply R1 to the pictures before augmentation, scaled by its interval."""
        side, count = self._config.resolution, len(real)
        gamma = 0.0002 * side * side / count if self._r1 is None else self._r1

        def loss(params: Params) -> jax.Array:
            return r1_penalty(lambda x: self._score(params, self._augmented(x, key, state.seen["strength"])), real)

        value, grads = jax.value_and_grad(loss)(state.discriminator)
        grads = jax.tree.map(lambda grad: grad * (gamma / 2 * R1_INTERVAL_STEPS), grads)
        return self._update_discriminator(replace(state, seen=state.seen | {"r1": value}), grads)

    def _regularise_generator(self, state: State, count: int, key: jax.Array) -> State:
        """Pull the path lengths of half a batch towards their running mean."""
        keys = jax.random.split(key, 3)
        count, side = max(count // 2, 1), self._config.resolution
        noise = jax.random.normal(keys[0], (count, side, side, 3))

        def loss(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            w_BxLxD = self._codes(params, count, keys[1])
            length_B = path_lengths(lambda w: self._synthesize(params, w, keys[2]), w_BxLxD, noise)
            now, before = length_B.mean(), state.seen["path_mean"]
            # a mean that starts at 0 would shorten all paths for hundreds of steps
            mean = jnp.where(before == 0, now, PATH_MEAN_DECAY * before + (1 - PATH_MEAN_DECAY) * now)
            return PATH_WEIGHT * PATH_INTERVAL_STEPS * jnp.square(length_B - mean).mean(), (mean, w_BxLxD)

        (_, (mean, w_BxLxD)), grads = jax.value_and_grad(loss, has_aux=True)(state.generator)
        state = _with_w_mean(replace(state, seen=state.seen | {"path_mean": mean}), w_BxLxD)
        return self._update_generator(state, grads)

    def _generate(self, params: Params, count: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return pictures from random codes, and the codes w_BxLxD."""
        keys = jax.random.split(key, 2)
        w_BxLxD = self._codes(params, count, keys[0])
        return self._synthesize(params, w_BxLxD, keys[1]), w_BxLxD

    def _codes(self, params: Params, count: int, key: jax.Array) -> jax.Array:
        """Draw w_BxLxD; most batches switch to a second code at a random layer (Karras et al. 2019, section 3.1)."""
        D, L = self._config.latent, self._config.layers
        keys = jax.random.split(key, 3)
        z_Bx2xD = jax.random.normal(keys[0], (count, 2, D))  # keeps both codes of a picture on one device
        w_Bx2xD = generator.to_w(params, z_Bx2xD.reshape(-1, D)).reshape(z_Bx2xD.shape)
        cut = jnp.where(jax.random.bernoulli(keys[2], MIXING_PROBABILITY), jax.random.randint(keys[1], (), 1, L), L)
        early_L = jnp.arange(L) < cut
        return jnp.where(early_L[None, :, None], w_Bx2xD[:, :1], w_Bx2xD[:, 1:])

    def _synthesize(self, params: Params, w_BxLxD: jax.Array, key: jax.Array) -> jax.Array:
        return generator.synthesize(params, w_BxLxD, key, self._config, self._form)

    def _score(self, params: Params, x_BxHxWx3: jax.Array) -> jax.Array:
        return discriminator.score(params, x_BxHxWx3, self._config, self._form)

    def _augmented(self, x: jax.Array, key: jax.Array, strength: jax.Array) -> jax.Array:
        return augment.augment(x, key, strength, self._form.half) if self._adapt else x

    def _update_discriminator(self, state: State, grads: Params) -> State:
        params, opt = _updated(self._d_adam, state.discriminator, state.discriminator_opt, grads)
        return replace(state, discriminator=params, discriminator_opt=opt)

    def _update_generator(self, state: State, grads: Params) -> State:
        params, opt = _updated(self._g_adam, state.generator, state.generator_opt, grads)
        return replace(state, generator=params, generator_opt=opt)

    def _with_strength(self, state: State, step: Any, count: int) -> State:
        signs, strength = state.seen["signs"], state.seen["strength"]
        due = (step + 1) % augment.ADJUST_INTERVAL_STEPS == 0
        if self._adapt:
            strength = jnp.where(
                due, augment.adjusted(strength, signs, augment.ADJUST_INTERVAL_STEPS * count), strength
            )
        return replace(state, seen=state.seen | {"strength": strength})

    def _with_average(self, state: State, step: Any, count: int) -> State:
        pictures = jnp.asarray(step, jnp.float32) * count
        half_life = jnp.minimum(self._half_life, MAX_HALF_LIFE_SHARE * pictures)
        decay = 0.5 ** (count / jnp.maximum(half_life, 1e-8))  # 0 in the first step
        average = jax.tree.map(lambda old, new: new + (old - new) * decay, state.average, state.generator)
        return replace(state, average=average)

    def _matmul_precision(self) -> AbstractContextManager[Any]:
        full = self._precision == "highest"
        return jax.default_matmul_precision("highest") if full else nullcontext()


def _with_w_mean(state: State, w_BxLxD: jax.Array) -> State:
    # the first layer's codes are never mixed
    return replace(state, w_mean=W_MEAN_DECAY * state.w_mean + (1 - W_MEAN_DECAY) * w_BxLxD[:, 0].mean(0))


def pixels(pictures: jax.Array) -> jax.Array:
    """Convert bytes to float32 from -1 to 1."""
    return pictures.astype(jnp.float32) / 127.5 - 1


def _every(interval: int, step: Any, change: Callable[[State], State], state: State) -> State:
    """Apply `change` at every `interval`th step from the first on; the device decides, in one program for all steps."""
    return jax.lax.cond(jnp.asarray(step) % interval == 0, change, lambda same: same, state)


def _adam(rate: float, interval: int) -> optax.GradientTransformation:
    # corrected for the extra regularisation step (Karras et al. 2020, appendix B)
    share = interval / (interval + 1)
    return optax.adam(rate * share, b1=0.0, b2=BETA2**share, eps=1e-8)


def _updated(adam: optax.GradientTransformation, params: Params, opt: Any, grads: Params) -> tuple[Params, Any]:
    with jax.numpy_dtype_promotion("standard"):  # optax's updates do not pass the strict rules
        updates, opt = adam.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt
