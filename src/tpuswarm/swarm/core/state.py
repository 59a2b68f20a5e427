"""The coordinator as a state machine: membership, leases, acceptance, rounds, records; never a tensor.

Every function takes a state and what happened and returns the next state and what to do or answer. Whoever runs it
does what it is told in that order; between any two steps the process may die, and `start` goes on from the ledger.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from tpuswarm.swarm.core.arithmetic.outer import advance
from tpuswarm.swarm.core.choose import choose, effective
from tpuswarm.swarm.core.known import (
    Lease,
    State,
    accepted_rows,
    cycle_of,
    held_by_others,
    rows_taken,
    undecided_of,
)
from tpuswarm.swarm.core.messages import Accepted, Beat, Granted, Merge, Outdated, Refused, StoreHeader, Terms
from tpuswarm.swarm.core.rounds import Due, Patience
from tpuswarm.swarm.core.rows import NOTHING, Rows
from tpuswarm.swarm.core.values import Digests, Header, Identity, Incarnation, Record
from tpuswarm.swarm.core.view import View

BEATS = 400.0
"""A second, of all members together while no pause is longer than half of a lease time, which is what a new coordinator
listens for: with their carrying less than half a core (benchmarks/beats.py).
"""
LIVES = 3
"""Pauses that a lease lasts at least: one that is lost is made up."""
LATELY = 3
"""So many last records name those whom a new epoch awaits."""


def start(
    terms: Terms, view: View, headers: Iterable[Header], now: float, *, founded: bool, alone: bool = False
) -> State:
    """The state of a new epoch. headers: all stored ones; founded: genesis was created a moment ago, so that no lease
    was ever granted; alone: whoever held one is known to be dead. With either there is nobody to wait for. The run
    keeps the momentum that it has.
    """
    terms = replace(terms, outer=replace(terms.outer, momentum=view.newest.momentum))
    alone = alone or founded
    pending = {header.identity: (header, now) for header in headers if not view.has_decided(header.identity)}
    contributed = {key.member for key in (*view.verdicts, *(identity.incarnation for identity in pending))}
    lately = {
        key.member for key, (_, version) in view.verdicts.items() if not alone and version > view.version - LATELY
    }
    return State(
        terms=terms,
        view=view,
        epoch=view.newest.epoch + (not founded),
        recovering_until=-math.inf if alone else now + terms.lease_seconds,
        # Else who pushed last would be the whole quorum until the others have announced themselves.
        awaited=frozenset(lately.union(terms.members)),
        awaited_until=now + (terms.patience.deadline_first if alone else terms.lease_seconds),
        pending=pending,
        taken=Rows.union([view.spent, *(header.rows for header, _ in pending.values())]),
        contributed=frozenset(contributed),
        processed=view.processed,
    )


def beat(state: State, said: Beat, now: float) -> tuple[State, Granted | Refused | Outdated]:
    """Renew, grant, or refuse."""
    key, view = said.incarnation, state.view
    if said.base > view.version:
        return state, Outdated(said.base)
    if key in state.fenced:
        return state, Refused("fenced: its lease expired, or its member came back as a new incarnation")
    if said.digests != state.terms.digests:
        return state, Refused(disagreement(said.digests, state.terms.digests))
    verdict = view.verdict(said.undecided) if said.undecided else None
    ruled = verdict.rows if verdict else NOTHING  # decided on, not heard of yet
    outstanding = said.outstanding - ruled
    if key not in state.leases:
        rows = NOTHING
        if said.joined:
            if not state.recovering:
                return state, Refused("unknown: it reported in too late")
            if outstanding & view.spent:
                return state, Refused(f"its rows {outstanding & view.spent} are already counted or skipped")
            claimed = said.todo | outstanding
            if verdict and verdict.fate == "returned":
                claimed |= ruled
            rows = claimed - view.spent
            if others := rows & held_by_others(state, key):
                return state, Refused(f"its rows {others} are claimed by others")
        else:
            state = _fence(state, [each for each in state.leases if each.member == key.member])
    elif strange := outstanding - state.leases[key].rows:
        return state, Refused(f"rows {strange} are not leased to it")
    else:
        rows = state.leases[key].rows
    fastest = max(said.rows_per_s or 0.0, state.fastest or 0.0) or None
    cycle = cycle_of(state.terms, said.rows_per_s, fastest)
    if not state.recovering:
        missing = min(2 * cycle - len(rows - accepted_rows(state, said.undecided)), state.room)
        if missing > 0:
            rows |= state.taken.free(missing)
    pause = min(max(1, len(state.leases)) / BEATS, state.terms.lease_seconds / 2)
    until = now + max(state.terms.lease_seconds, LIVES * pause)
    if key in state.leases and said.stalled > _stall(state.terms.patience, cycle, said.rows_per_s):
        until = state.leases[key].until  # it talks, but its rows would never come back
    news = said.processed > state.processed.get(key, -1)
    state = replace(
        state,
        leases={**state.leases, key: Lease(rows, until, said.base, said.rows_per_s, outstanding)},
        taken=state.taken | rows,
        fastest=fastest,
        seen=state.seen if key.member in state.seen else state.seen | {key.member},
        processed={**state.processed, key: said.processed} if news else state.processed,
    )
    undecided = said.undecided
    known = undecided is None or view.has_decided(undecided) or undecided in state.pending or undecided in state.storing
    return state, Granted(
        rows=rows,
        cycle=cycle,
        version=view.version,
        tokens=view.newest.tokens,
        state=view.newest.state if view.version > said.base else (),
        verdict=verdict,
        unknown=not known,
        pause=pause,
        ended=state.ended,
    )


def push(state: State, header: Header) -> tuple[State, StoreHeader | Accepted | Refused | Outdated]:
    """Whether a contribution whose payload is stored may be accepted; a repeat is answered as before."""
    key, identity, view = header.identity.incarnation, header.identity, state.view
    if header.base > view.version:
        return state, Outdated(header.base)
    if view.has_decided(identity):
        return state, StoreHeader(header)  # it is stored for ever: whether with the same digests, only the header says
    if identity in state.pending:
        same = state.pending[identity][0] == header
        return state, Accepted() if same else Refused("a different push with the same identity was accepted")
    if key not in state.leases:
        return state, Refused("it holds no lease")
    if header.run != state.terms.run:
        return state, Refused(f"it belongs to run {header.run}, this is run {state.terms.run}")
    if not header.rows or header.tokens != len(header.rows) * state.terms.tokens_per_row:
        return state, Refused(f"{header.tokens} tokens do not match {len(header.rows)} rows")
    if strange := header.rows - state.leases[key].rows:
        return state, Refused(f"rows {strange} are not leased to it")
    if any(True for _ in undecided_of(state, key)) and state.storing.get(identity) != header:
        return state, Refused("another of its pushes is still undecided")
    if identity.sequence != (following := view.decided_pushes(key) + 1):  # one left out would never get a verdict
        return state, Refused(f"its push {identity.sequence} is not the next: that is push {following}")
    return replace(state, storing={**state.storing, identity: header}), StoreHeader(header)


def stored(state: State, header: Header, now: float) -> State:
    """The header was created, or found to be there with the same bytes: accepted."""
    storing = {identity: each for identity, each in state.storing.items() if identity != header.identity}
    if state.view.has_decided(header.identity):
        return replace(state, storing=storing)
    return replace(
        state,
        storing=storing,
        pending={**state.pending, header.identity: (header, now)},
        contributed=state.contributed | {header.identity.incarnation.member},
    )


def leave(state: State, key: Incarnation) -> State:
    """A member goes: what it holds and has not handed in is leasable again."""
    return _fence(state, [key] if key in state.leases else [])


def tick(state: State, now: float) -> tuple[State, Merge | None, Due]:
    """What time brings: the end of recovery, expired leases, the end of a round."""
    if state.recovering and now >= state.recovering_until:
        state = replace(state, recovering_until=-math.inf)
    if not state.recovering:
        state = _fence(state, [key for key, lease in state.leases.items() if lease.until <= now])
    if now >= state.awaited_until and not state.seen.issuperset(state.awaited):
        state = replace(state, seen=state.seen | state.awaited)
    speeds = [lease.rows_per_s for lease in state.leases.values() if lease.rows_per_s]
    state = replace(state, fastest=max(speeds, default=None))
    when = state.round(now)
    if state.merging or not when.now:
        return state, None, when
    merge = _merge(state, [header for header, _ in state.pending.values()], when.reason)
    return replace(state, merging=merge), merge, when


def unreadable(state: State, lost: Iterable[Identity]) -> tuple[State, Merge]:
    """The merge under way found payloads gone: choose again among the same contributions, returning those."""
    merging = state.merging
    assert merging is not None
    state = replace(state, unreadable=state.unreadable | frozenset(lost))
    headers = [state.pending[decision.identity][0] for decision in merging.decisions]
    merge = _merge(state, headers, merging.reason)
    return replace(state, merging=merge), merge


def merged(
    state: State,
    parent: str,
    fragments: tuple[str, ...],
    outer: tuple[str, ...],
    updates: tuple[str, ...],
    time: float,
) -> Record:
    """The record to create, only if absent, from what the shards computed; then report to `committed`."""
    merge, view = state.merging, state.view
    assert merge is not None
    applied = [decision for decision in merge.decisions if decision.fate == "applied"]
    made_by = merge.outer if applied else view.newest  # without contributors all of it is repeated
    return Record(
        run=state.terms.run,
        version=merge.version,
        epoch=state.epoch,
        parent=parent,
        state=fragments,
        outer=outer,
        decisions=merge.decisions,
        rule=made_by.rule,
        rate=merge.rate,
        momentum=made_by.momentum,
        share=merge.share,
        gathered=merge.gathered,
        tokens=view.tokens + sum(decision.tokens for decision in applied),
        changes=view.newest.changes + bool(applied),
        processed=tuple(sorted(state.processed.items() - view.processed.items())),
        digests=state.terms.digests,
        time=time,
        downlink=made_by.downlink,
        updates=updates,
        averaged=made_by.averaged,
        kept=merge.kept if applied else view.newest.kept,
    )


def committed(state: State, record: Record) -> State:
    """The record was created, or found to be there with the same bytes."""
    view = state.view.after(record)
    void = {each.identity.incarnation: each.rows for each in record.decisions if each.fate == "void"}
    leases = {
        key: replace(lease, rows=lease.rows - view.spent - void.get(key, NOTHING))
        for key, lease in state.leases.items()
    }
    gone = {decision.identity for decision in record.decisions}
    state = replace(
        state,
        view=view,
        leases=leases,
        pending={identity: each for identity, each in state.pending.items() if identity not in gone},
        merging=None,
        unreadable=state.unreadable - gone,
    )
    return replace(state, taken=rows_taken(state))


def _merge(state: State, headers: Iterable[Header], reason: str) -> Merge:
    decisions = choose(state.view, headers, state.unreadable, state.terms.staleness)
    weights = [decision.weight for decision in decisions if decision.fate == "applied"]
    # A momentum step as often as every live member has contributed: members that take turns would otherwise make two
    # where one belongs, which ruins a model (benchmarks/quality.py, "out of step").
    need = max(state.terms.patience.quorum_min, len(state.live))
    share, gathered = advance(state.terms.outer, state.view.newest.gathered, len(weights), need)
    outer = state.terms.outer
    rate = outer.rate_for(effective(weights), share) if weights else 0.0
    tokens = sum(decision.tokens for decision in decisions if decision.fate == "applied")
    kept = outer.average.kept(tokens, state.view.tokens + tokens) if outer.average and weights else None
    return Merge(state.view.version + 1, tuple(decisions), outer, rate, share, gathered, kept, reason)


def _fence(state: State, keys: Iterable[Incarnation]) -> State:
    gone = frozenset(keys)
    if not gone:
        return state
    leases = {key: lease for key, lease in state.leases.items() if key not in gone}
    state = replace(state, leases=leases, fenced=state.fenced | gone)
    return replace(state, taken=rows_taken(state))


def _stall(patience: Patience, cycle: int, rows_per_s: float | None) -> float:
    """Seconds that a member's devices may be at one thing."""
    if not rows_per_s:
        return patience.stall_first
    return patience.stall_least + patience.stall_cycles * cycle / rows_per_s


def disagreement(theirs: Digests, ours: Digests) -> str:
    """What differs between a member and the run, in words."""
    names = [name for name in ("layout", "config", "data", "code") if getattr(theirs, name) != getattr(ours, name)]
    return f"its {' and '.join(names)} {'differs' if len(names) == 1 else 'differ'} from the run's"
