"""One host of a program that trains a small network; it writes what its tests compare to its folder."""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.hosts import SECRET
from tests.train import toy, wide
from tpuswarm import supervised
from tpuswarm.cloud.rehearsal.machines.python.jax_plugins import tpuswarm_slice
from tpuswarm.train.data import placing
from tpuswarm.train.data.feed import read_checked_rows
from tpuswarm.train.hosts import rendezvous
from tpuswarm.train.program import mesh
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request

BATCH, STEPS, WIDTH = 16, 10, 32
SHARDED_BYTES = 64
"""Smallest leaf that is split; set where a host starts, as tests import this file too."""


def recipe(seed: int = 0):
    splits = {"train": wide.rows(seed, WIDTH), "validation": wide.rows(seed + 1, WIDTH)}
    init = partial(wide.init, width=WIDTH)
    return supervised(init, wide.loss, lambda rate, mask: optax.adam(rate), splits.get, lambda progress: 0.03)


def train(shard: str, steps: int, after_step=lambda step: None):
    """Return the losses of `steps` steps on all devices of all hosts, and the parameters after them."""
    source = recipe().data("train")
    compiled = compile_step(recipe(), Request(batch=BATCH, shard=shard), jax.devices())
    state, losses, read = compiled.init(jax.random.key(0)), [], set()
    for step in range(steps):

        def read_mine(first, count, step=step):
            read.add(count)
            return read_checked_rows(source, compiled.program.batch_spec(count), step * BATCH + first, count)

        batch = placing.place_batch(read_mine, BATCH, mesh.batch_sharding(compiled.mesh))
        state, metrics = compiled.step(state, batch, toy.clock(step, step / steps, seed=1))
        losses.append(float(metrics["loss"]))
        after_step(step)
    shared = compiled.program.exchange().get(state)
    split = any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(shared))
    params = {name: np.asarray(leaf).tolist() for name, leaf in placing.to_host(shared).items()}
    return {"losses": losses, "params": params, "split": split, "read": sorted(read)}


def exchange(shift: int) -> None:
    """Exchange between pairs of devices that had no connection before, without waiting for all devices, as JAX does."""
    zero, one = np.asarray(jax.devices()).reshape(2, -1)
    pairs = Mesh(np.stack([zero, np.roll(one, shift)], axis=1), ("pair", "host"))
    x = jax.make_array_from_callback(
        (len(zero), 2), NamedSharding(pairs, P("pair", "host")), lambda index: np.ones((1, 1))
    )
    jax.jit(lambda x: x.sum(axis=1), out_shardings=NamedSharding(pairs, P("pair")))(x)


def main() -> None:
    index, about = int(sys.argv[1]), json.loads(sys.argv[2])
    mesh.MIN_SHARDED_BYTES = SHARDED_BYTES
    folder = Path(about["folder"])
    if about.get("numbered_by_slice"):
        tpuswarm_slice.initialize()
    with rendezvous.initialize(about["address"], 2, index, SECRET, 240):
        if "shards" in about:
            trained = {shard: train(shard, STEPS) for shard in about["shards"]}
            (folder / f"{index}.json").write_text(json.dumps([trained, jax.process_index()]))
            for shift in range(4):
                exchange(shift)
        else:
            train("replicate", 10**9, lambda step: (folder / f"{index}.step").write_text(str(step)))


if __name__ == "__main__":
    main()
