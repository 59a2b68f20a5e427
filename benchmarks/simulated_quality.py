"""Simulate the effect of a swarm's rules on quality: members are a vmapped axis of one computation on one device.

Decisions (weights, clipping, rates, momentum steps) are those of `core`; sums are its JAX twins. Chance is removed:
every cycle takes all members the same time, contributions arrive in the order of the members, and no failure loses any.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import jax_twins as twins
from tpuswarm.swarm.core.arithmetic.adopt import add, mix
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.arithmetic.outer import OuterRule, advance_quorum
from tpuswarm.swarm.core.arithmetic.quantize import decode, encode, feedback
from tpuswarm.swarm.core.choose import clipping, effective
from tpuswarm.train.data.feed import read_checked_rows
from tpuswarm.train.loop.evaluate import FiniteSource
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.recipe import Batch, Clock, Program, Source, State


@dataclass(frozen=True)
class Arm:
    """A swarm and its rules. Raise ValueError for an impossible one.

    One member with the mean is plain training; many members are only with cycles of 1 step and inner SGD.
    """

    cycle: tuple[int, ...] = (30,) * 4
    """Steps of each member between two pushes. Different numbers are different speeds: a cycle is a time."""
    outer: OuterRule = field(default_factory=lambda: OuterRule("nesterov"))
    bits: int = 32
    """Bits of a code: 8, 4 or 2; 32 for plain contributions."""
    feedback: bool = True
    """Whether quantized contributions use error feedback."""
    delay: int = 0
    """Steps of the fastest member between a push and the adoption of its commit."""
    adopt: float | Literal["mix", "add"] = "mix"
    """`mix` as members do; `add` keeps all own progress; a number is the share to keep."""
    together: int = 0
    """Contributions that a commit counts; 0 for one of each member, 1 if members arrive one after the other."""
    quorum: int = 0
    """Contributions per momentum step; 0 for the number of members."""

    def __post_init__(self) -> None:
        if not self.cycle or min(self.cycle) < 1:
            raise ValueError(f"every member makes at least 1 step a cycle, not {self.cycle}")
        if self.bits not in (2, 4, 8, 32):
            raise ValueError(f"contributions have 2, 4, 8 or 32 bits, not {self.bits}")
        if not 0 <= self.delay <= max(self.cycle):
            raise ValueError(f"a delay of {self.delay} steps does not fit into a cycle of {max(self.cycle)}")
        if len(self.cycle) % self.at_once:
            raise ValueError(f"{len(self.cycle)} members cannot be counted {self.at_once} at a time")

    @property
    def at_once(self) -> int:
        """Contributions that a commit counts."""
        return self.together or len(self.cycle)

    @property
    def keep(self) -> np.ndarray | None:
        """The share of its own progress that each member keeps, float32[members]; None adds changes instead."""
        if self.adopt == "add":
            return None
        steps = np.array(self.cycle)
        after = self.delay * steps // steps.max()
        share = after / (after + steps) if self.adopt == "mix" else np.full(len(steps), self.adopt)
        return share.astype(np.float32)


class Members(NamedTuple):
    """The members' arrays; n is the number of shared parameters, in the order of one fragment."""

    states: State
    """Leaves have members as their first axis."""
    bases: jax.Array
    """f32[members, n], the version that each adopted last or adopts next."""
    snapshots: jax.Array
    """f32[members, n], from the last push."""


class Swarm(NamedTuple):
    """All arrays of a swarm."""

    members: Members
    left: jax.Array | None
    """f32[members, n], error feedback."""
    theta: jax.Array
    """f32[n]."""
    outer: jax.Array | None
    """f32[2, n]."""
    unsent: jax.Array | None
    """f32[n], the part that a quantized downlink has not sent."""


class Ticks(NamedTuple):
    """Steps of every member at each step of the fastest one, [ticks, members]."""

    own: jax.Array
    """int32, the member's step within the cycle."""
    active: jax.Array | None
    """bool, whether the member makes a step; None if all do."""
    number: jax.Array
    """int32, number of its batch in the run's order."""
    progress: jax.Array
    """float32, its share of the run."""


class Decided(NamedTuple):
    """Decisions on the commits of one cycle."""

    weights: jax.Array
    """f32[commits, contributions]."""
    clips: jax.Array
    """f32[commits, contributions]."""
    rates: jax.Array
    """f32[commits]."""
    shares: jax.Array
    """f32[commits]."""
    momentum_steps: jax.Array
    """bool[commits]."""


def simulate(program: Program, source: Source, arm: Arm, *, batch: int, steps: int, seed: int) -> State:
    """Train once on each of the rows 0 to batch x steps; return a state with the last version.

    batch: rows of a step of all members together, in equal shares; steps: mean steps of a member. One seed gives every
    arm the same first parameters. Raise ValueError if rows do not divide among members or steps among cycles, and for
    shared leaves that are not float32.
    """
    every, a_cycle = len(arm.cycle), sum(arm.cycle)
    if batch % every or steps * every % a_cycle:
        raise ValueError(
            f"{every} members do not divide batches of {batch} rows, or {steps} steps of each are no whole number of "
            f"cycles of {a_cycle} steps of all"
        )
    size, cycles = batch // every, steps * every // a_cycle
    init_key, step_key = jax.random.split(run_key(seed))
    swarm = start(init_key, program=program, arm=arm)
    gathered = 0.0
    for cycle in range(cycles):
        rows = rows_of(program, source, arm, size, cycle)
        ticks = ticks_of(arm, cycle, cycles)
        members, norms = train(swarm.members, rows, ticks, arm.delay, arm.keep, step_key, program=program)
        decided, gathered = decide(arm, np.asarray(norms).tolist(), gathered)
        swarm = commit(swarm._replace(members=members), decided, arm=arm)
    state = jax.tree.map(lambda leaf: leaf[0], swarm.members.states)
    return program.exchange().put(state, tree_of(swarm.theta, program.exchange().get(state)))


def held_out_loss(program: Program, state: State, source: FiniteSource, batch: int, most_rows: int) -> float:
    """Return the mean loss over whole batches of held-out rows, at most `most_rows` of them."""
    rows = min(most_rows, source.rows_per_epoch)
    spec = program.batch_spec(batch)
    found = [
        _evaluate(state, read_checked_rows(source, spec, first, batch), program=program)
        for first in range(0, rows - batch + 1, batch)
    ]
    return float(np.mean(jax.device_get(found), dtype=np.float64))


@partial(jax.jit, static_argnames=("program", "arm"))
def start(key: jax.Array, *, program: Program, arm: Arm) -> Swarm:
    """Start all members from one genesis."""
    state = program.init(key)
    theta = flat_of(program.exchange().get(state))

    def every(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (len(arm.cycle), *leaf.shape))

    return Swarm(
        members=Members(jax.tree.map(every, state), every(theta), every(theta)),
        left=every(jnp.zeros_like(theta)) if arm.bits < 32 and arm.feedback else None,
        theta=theta,
        outer=None if arm.outer.rule == "average" else jnp.zeros((2, theta.size)),
        unsent=None if arm.outer.downlink == "plain" else jnp.zeros_like(theta),
    )


@partial(jax.jit, static_argnames="program", donate_argnames="members")
def train(
    members: Members, rows: Batch, ticks: Ticks, delay: int, keep: Any, key: jax.Array, *, program: Program
) -> tuple[Members, jax.Array]:
    """Train all members for one cycle, from push to push; also return the norms of their deltas, f32[members].

    rows: arrays [members, steps, rows of a step, ...]; delay: ticks until the last push's commit is adopted; keep: as
    Arm.keep.
    """
    exchange = program.exchange()

    def member(state: State, rows: Batch, tick: Ticks) -> State:
        batch = jax.tree.map(lambda leaf: leaf[tick.own], rows)
        clock = Clock(jax.random.fold_in(key, tick.number), tick.number, tick.progress)
        new, _ = program.step(state, batch, clock)
        if (active := tick.active) is None:
            return new
        return jax.tree.map(lambda then, now: jnp.where(active, then, now), new, state)

    def all_members(tick: jax.Array, states: State) -> State:
        return jax.vmap(member)(states, rows, jax.tree.map(lambda leaf: leaf[tick], ticks))

    def adopted(state: State, new: jax.Array, reference: jax.Array, keep: jax.Array | None) -> State:
        now = exchange.get(state)
        trees = now, tree_of(new, now), tree_of(reference, now)
        return exchange.put(state, add(*trees) if keep is None else mix(*trees, keep))

    def run_ticks(after: jax.Array, states: State) -> State:
        """Run the ticks before or after the adoption; one loop over both compiles a step only once."""
        first, stop = jnp.where(after, delay, 0), jnp.where(after, len(ticks.own), delay)
        states = jax.lax.fori_loop(first, stop, all_members, states)
        new = jnp.where(after, members.snapshots, members.bases)  # equal to its reference: changes nothing
        return jax.vmap(adopted)(states, new, members.snapshots, keep)

    states = jax.lax.fori_loop(0, 2, run_ticks, members.states)
    snapshots = jax.vmap(lambda state: flat_of(exchange.get(state)))(states)
    norms = jnp.sqrt(jnp.square(members.bases - snapshots).sum(axis=1))
    return Members(states, members.bases, snapshots), norms


@partial(jax.jit, static_argnames="arm", donate_argnames="swarm")
def commit(swarm: Swarm, decided: Decided, *, arm: Arm) -> Swarm:
    """Make the commits of one cycle in sequence; each member will adopt the one that counts its contribution."""
    (states, bases, snapshots), left = swarm.members, swarm.left
    sent = snapshots
    if arm.bits < 32:
        wanted = bases - snapshots
        wanted = wanted if left is None else wanted + left
        codes, scales = jax.vmap(partial(encode, bits=arm.bits))(wanted)
        sent = bases - jax.vmap(partial(decode, size=wanted.shape[1], bits=arm.bits))(codes, scales)
        if left is not None:
            left = jax.vmap(partial(feedback, bits=arm.bits))(wanted, codes, scales)

    def one(before: Any, of: tuple[jax.Array, jax.Array, Decided]) -> Any:
        theta, outer, unsent = before
        snapshots, bases, by = of
        new, outer = twins.commit(
            theta, outer, snapshots, bases, by.weights, by.clips, arm.outer, by.rates, by.shares, by.momentum_steps
        )
        if unsent is not None:
            new, unsent = twins.publish(theta, new, unsent, arm.outer.downlink)
        return (new, outer, unsent), new

    def grouped(rows: jax.Array) -> jax.Array:
        return rows.reshape(-1, arm.at_once, rows.shape[1])

    before = swarm.theta, swarm.outer, swarm.unsent
    after, versions = jax.lax.scan(one, before, (grouped(sent), grouped(bases), decided))
    bases = jnp.repeat(versions, arm.at_once, axis=0)
    return Swarm(Members(states, bases, snapshots), left, *after)


@partial(jax.jit, static_argnames="program")
def _evaluate(state: State, batch: Batch, *, program: Program) -> jax.Array:
    return program.evaluate(state, batch)["loss"]


def decide(arm: Arm, norms: list[float], gathered: float) -> tuple[Decided, float]:
    """Decide on the contributions of one cycle as `core` does; also return the gathered shares of a quorum."""
    commits: list[tuple[Any, ...]] = []
    for first in range(0, len(arm.cycle), arm.at_once):
        part = slice(first, first + arm.at_once)
        weights = [steps / sum(arm.cycle[part]) for steps in arm.cycle[part]]
        share, gathered = advance_quorum(arm.outer, gathered, arm.at_once, arm.quorum or len(arm.cycle))
        rate = arm.outer.rate_for(effective(weights), share)
        commits.append((weights, clipping(norms[part]), rate, share, gathered == 0))
    return Decided(*(jnp.asarray(column) for column in zip(*commits, strict=True))), gathered


def ticks_of(arm: Arm, cycle: int, cycles: int) -> Ticks:
    """Return the ticks of a cycle, counted from 0; members make their steps at even intervals.

    Progress is as in core/member_state.py: counted in the member's base, plus its own outstanding steps.
    """
    steps, longest, whole = np.array(arm.cycle), max(arm.cycle), sum(arm.cycle)
    at = np.arange(longest)[:, None]
    own = at * steps // longest
    active = (at + 1) * steps // longest > own
    first = np.cumsum(steps) - steps
    with_it = np.cumsum(steps)[arm.at_once - 1 :: arm.at_once].repeat(arm.at_once)

    def counted(push: int) -> np.ndarray:
        return push * whole + with_it if push >= 0 else np.zeros_like(steps)

    undecided = counted(cycle - 2) + steps + own if cycle else own
    done = np.where(at < arm.delay, undecided, counted(cycle - 1) + own)
    return Ticks(
        own=jnp.asarray(own, jnp.int32),
        active=None if active.all() else jnp.asarray(active),
        number=jnp.asarray(cycle * whole + first + own, jnp.int32),
        progress=jnp.asarray(done / (cycles * whole), jnp.float32),
    )


def rows_of(program: Program, source: Source, arm: Arm, size: int, cycle: int) -> dict[str, np.ndarray]:
    """Return the rows of a cycle, [members, steps, size, ...]: one range per member, zeros for its idle ticks."""
    whole = sum(arm.cycle)
    found = read_checked_rows(source, program.batch_spec(whole * size), cycle * whole * size, whole * size)
    ends = np.cumsum(arm.cycle)[:-1]

    def dealt(leaf: np.ndarray) -> np.ndarray:
        parts = np.split(leaf.reshape(whole, size, *leaf.shape[1:]), ends)
        longest = max(arm.cycle)
        rests = [np.zeros((longest - len(part), *part.shape[1:]), part.dtype) for part in parts]
        return np.stack([np.concatenate(pair) for pair in zip(parts, rests, strict=True)])

    return {name: dealt(leaf) for name, leaf in found.items()}


def _layout(shared: Any) -> Layout:
    leaves = zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True)
    return Layout.pack({path: (leaf.shape, leaf.dtype) for path, leaf in leaves}, 1)


def flat_of(shared: Any) -> jax.Array:
    """Flatten shared parameters into one fragment, f32[n]."""
    leaves = dict(zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True))
    (flat,) = _layout(shared).split(leaves)
    return flat


def tree_of(flat: Any, like: Any) -> Any:
    """Give one fragment, f32[n], the structure of the shared parameters `like`."""
    arrays = _layout(like).join([flat])
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in leaf_paths(like)])
