"""A program of one's own, with two losses and an average, from the public names alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tpuswarm

RATE = 0.1


def critic_loss(critic: Any, fake: Any, real: Any) -> Any:
    return jnp.mean(jax.nn.softplus(fake * critic)) + jnp.mean(jax.nn.softplus(-real * critic))


def maker_loss(mean: Any, critic: Any, noise: Any) -> Any:
    return jnp.mean(jax.nn.softplus(-(mean + noise) * critic))


class Game(tpuswarm.Program):
    """The critic moves first, the maker answers it; the average of the maker is what is evaluated."""

    def init(self, key, shared=None):
        return {"shared": shared or {"mean": jnp.zeros(()), "critic": jnp.ones(())}, "average": jnp.zeros(())}

    def step(self, state, batch, clock):
        noise = jax.random.normal(jax.random.fold_in(clock.key, clock.step), batch["x"].shape)
        mean, critic = state["shared"]["mean"], state["shared"]["critic"]
        critic_value, gradient = jax.value_and_grad(critic_loss)(critic, mean + noise, batch["x"])
        critic = critic - RATE * gradient
        value, gradient = jax.value_and_grad(maker_loss)(mean, critic, noise)
        mean = mean - RATE * gradient
        after = {"shared": {"mean": mean, "critic": critic}, "average": 0.9 * state["average"] + 0.1 * mean}
        return after, {"loss": value, "critic_loss": critic_value}

    def evaluate(self, state, batch):
        return {"loss": jnp.square(batch["x"].mean() - state["average"])}

    def batch_spec(self, size):
        return {"x": jax.ShapeDtypeStruct((size,), np.float32)}

    def exchange(self):
        return tpuswarm.Exchange(lambda state: state["shared"], lambda state, shared: {**state, "shared": shared})

    def parameters(self, state):
        return [tpuswarm.Parameter(name, frozen=False, decayed=False, tied="") for name in ("critic", "mean")]


class Recipe(tpuswarm.Recipe):
    name = "game"

    def program(self, options):
        options.require_only(by=self.name)
        return Game()

    def data(self, split):
        return tpuswarm.ArraySource({"x": np.linspace(2, 4, 64, dtype=np.float32)})


def test_two_losses_and_an_average_train_on_several_devices(devices, tmp_path):
    result = tpuswarm.Trainer(devices=len(devices)).fit(Recipe(), steps=40, batch=16, run=tmp_path / "run")
    assert result.state["average"] > 0.1 and result.metrics["critic_loss"] > 0
    alone = tpuswarm.Trainer(devices=1).fit(Recipe(), steps=40, batch=16, run=tmp_path / "alone")
    np.testing.assert_allclose(result.state["average"], alone.state["average"], rtol=1e-4)
    assert result.metrics["eval_loss"] < 9  # which it is where the average stays at 0
