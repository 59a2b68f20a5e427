"""What a swarm loses by members that come back: with the inner state of some cycles before, or with none.

Four members, cycle 30, Nesterov; every fifth cycle the next of them begins again from the newest version. Everything
else is as in `quality`, whose small model it is.
"""

from collections.abc import Iterator
from functools import partial
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.quality import QUICK, SIZES, Runs, difference
from benchmarks.report import Settings, Skipped, Table
from tpuswarm.swarm.core.arithmetic.adopt import add
from tpuswarm.swarm.member.holder import RAMP
from tpuswarm.swarm.simulation import quality
from tpuswarm.swarm.simulation.quality import Arm, Members, Ticks, held_out_loss
from tpuswarm.train.recipe import Batch, Clock, Program, Source, State

EVERY = 5
"""Cycles from one return to the next."""
ARMS = {
    "nobody comes back": None,
    "its inner state, 1 cycle old": 1,
    "its inner state, 4 cycles old": 4,
    f"none, and {RAMP} small steps": "ramp",
    "none": "none",
}


def run(settings: Settings) -> Iterator[Table]:
    """One table."""
    if not settings.data.is_file():
        raise Skipped(f"there is no {settings.data}; give a text, tinyshakespeare's for example, with --data")
    runs = Runs(QUICK if settings.quick else SIZES["small"], str(settings.data))
    losses = {how: [_loss(runs, seed, kind) for seed in range(runs.size.seeds)] for how, kind in ARMS.items()}
    base = losses["nobody comes back"]
    rows = [
        (how, f"{mean(found):.4f}", "" if found is base else difference(_over(found, base), mean(base)))
        for how, found in losses.items()
    ]
    cycles = runs.size.steps // 30
    notes = [
        f"4 members, cycle 30, nesterov, {runs.size.seeds} seeds; a member returns every {EVERY} of {cycles} cycles, "
        "each in turn"
    ]
    columns = ("what it has then", "validation loss", "over nobody: mean ± standard error")
    yield Table("Quality, members that come back", columns, rows, notes)


def _over(found: list[float], base: list[float]) -> list[float]:
    return [here - there for here, there in zip(found, base, strict=True)]


def _loss(runs: Runs, seed: int, kind: int | str | None) -> float:
    size = runs.size
    state = _train(runs.program, runs.source(seed), Arm(), size.batch, size.steps, seed, kind)
    return held_out_loss(runs.program, state, runs.source_held_out, size.batch, size.held_out)


def _train(program: Program, source: Source, arm: Arm, batch: int, steps: int, seed: int, kind: Any) -> State:
    """`quality.simulate`, with returns."""
    every, whole = len(arm.cycle), sum(arm.cycle)
    cycles = steps * every // whole
    init_key, step_key = jax.random.split(jax.random.key(seed))
    swarm = quality.start(init_key, program=program, arm=arm)
    fresh = jax.tree.map(lambda leaf: leaf[0], swarm.members.states)
    left, gathered = np.zeros(every, np.float32), 0.0
    kept: list[State] = []
    for cycle in range(cycles):
        if kind is not None and cycle and cycle % EVERY == 0:
            who = cycle // EVERY % every
            had = _of(kept[-1 - kind], who) if isinstance(kind, int) else fresh
            swarm = swarm._replace(members=_returned(swarm.members, who, had, program))
            left[who] = RAMP - 1 if kind == "ramp" else 0
        rows = quality.rows_of(program, source, arm, batch // every, cycle)
        ticks = quality.ticks_of(arm, cycle, cycles)
        members, norms = _cycle(swarm.members, rows, ticks, step_key, jnp.asarray(left), program=program)
        kept = [*kept, jax.tree.map(jnp.copy, members.states)][-6:]
        left = np.maximum(left - np.array(arm.cycle), 0).astype(np.float32)
        decided, gathered = quality.decide(arm, np.asarray(norms).tolist(), gathered)
        swarm = quality.commit(swarm._replace(members=members), decided, arm=arm)
    state = _of(swarm.members.states, 0)
    return program.exchange().put(state, quality.tree_of(swarm.theta, program.exchange().get(state)))


def _of(states: State, member: int) -> State:
    return jax.tree.map(lambda leaf: leaf[member], states)


def _returned(members: Members, who: int, had: State, program: Program) -> Members:
    """A member begins with the newest version and the inner state that it has; there is nothing to adopt."""
    version = members.bases[who]
    state = program.exchange().put(had, quality.tree_of(version, program.exchange().get(had)))
    states = jax.tree.map(lambda leaf, own: leaf.at[who].set(own), members.states, state)
    return Members(states, members.bases, members.snapshots.at[who].set(version))


@partial(jax.jit, static_argnames="program", donate_argnames="members")
def _cycle(
    members: Members, rows: Batch, ticks: Ticks, key: jax.Array, left: jax.Array, *, program: Program
) -> tuple[Members, jax.Array]:
    """`quality.train` without delay; left: f32[members], small steps that each member still makes."""
    exchange = program.exchange()

    def adopted(state: State, new: jax.Array, reference: jax.Array) -> State:
        now = exchange.get(state)
        return exchange.put(state, add(now, quality.tree_of(new, now), quality.tree_of(reference, now)))

    def member(state: State, rows: Batch, tick: Ticks, left: jax.Array) -> State:
        batch = jax.tree.map(lambda leaf: leaf[tick.own], rows)
        new, _ = program.step(state, batch, Clock(jax.random.fold_in(key, tick.number), tick.number, tick.progress))
        share = 1 - jnp.maximum(left - tick.own, 0) / RAMP
        small = jax.tree.map(
            lambda a, b: jnp.where(share < 1, a + share * (b - a), b), exchange.get(state), exchange.get(new)
        )
        return exchange.put(new, small)

    def all_members(tick: jax.Array, states: State) -> State:
        return jax.vmap(member)(states, rows, jax.tree.map(lambda leaf: leaf[tick], ticks), left)

    states = jax.vmap(adopted)(members.states, members.bases, members.snapshots)
    states = jax.lax.fori_loop(0, len(ticks.own), all_members, states)
    snapshots = jax.vmap(lambda state: quality.flat_of(exchange.get(state)))(states)
    norms = jnp.sqrt(jnp.square(members.bases - snapshots).sum(axis=1))
    return Members(states, members.bases, snapshots), norms
