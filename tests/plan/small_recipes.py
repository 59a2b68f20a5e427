"""Small recipes. Run as a program, it carries out requests to compile: a line of JSON for each, with its result."""

import json
import sys
from dataclasses import asdict

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
        defaults={"batch": 4096},
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


if __name__ == "__main__":
    from tpuswarm.errors import InputError
    from tpuswarm.plan.compile.fit import check_fit
    from tpuswarm.plan.compile.request import CompileRequest

    for line in sys.stdin:
        steps: list[str] = []
        try:
            answer = {"result": asdict(check_fit(CompileRequest.from_json(json.loads(line)), steps.append))}
        except InputError as error:
            answer = {"refused": str(error)}
        print("answer", json.dumps({**answer, "steps": steps}))
