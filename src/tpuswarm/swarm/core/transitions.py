"""The coordinator as a state machine: membership, leases, acceptance, rounds, records; never a tensor.

Every function takes a state and an event, and returns the next state and an order or an answer. The caller executes the
orders in sequence. The process may die between any two steps; `start_epoch` resumes from the ledger.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from rpds import HashTrieMap, HashTrieSet

from tpuswarm.swarm.core.arithmetic.outer import advance_quorum
from tpuswarm.swarm.core.choose import UNTRUE_NORM, choose, effective
from tpuswarm.swarm.core.coordinator_state import (
    CoordinatorState,
    Lease,
    accepted_rows,
    cycle_of,
    held_by_others,
    updated,
    with_claims,
    without_leases,
)
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.messages import (
    Accepted,
    Granted,
    Heartbeat,
    Merge,
    Refused,
    StoreHeader,
    Superseded,
    Terms,
)
from tpuswarm.swarm.core.people import person_of
from tpuswarm.swarm.core.rounds import RoundStatus, RoundTimeouts
from tpuswarm.swarm.core.rows import NO_ROWS
from tpuswarm.swarm.core.values import Digests, Header, Identity, Incarnation, Record

MAX_HEARTBEATS_PER_S = 400.0
"""Limit for all members together; costs less than half a core. No pause exceeds half a lease time: a new coordinator
listens for one lease time, and hears every member."""
MIN_LEASE_PAUSES = 3
"""A lease lasts this many pauses, so that one lost heartbeat does not end it."""
MAX_LEASED_CYCLES = 32
"""A lease reaches at most this far ahead."""
MAX_EXCHANGE_S = 3600.0
MAX_USUAL_NORMS = 16
NORM_TOLERANCE = 1e-3
"""Members sum up in float32."""
PERSON_LEASE_S = 60.0
"""A lease of a member that dialled in lasts at least this long: its connection may be cut for half a minute."""
AWAITED_RECORD_COUNT = 3
"""A new epoch awaits the contributors of this many last records."""


def start_epoch(
    terms: Terms, view: LedgerView, headers: Iterable[Header], now: float, *, founded: bool, alone: bool = False
) -> CoordinatorState:
    """Return the state of a new epoch. It keeps the run's momentum.

    headers: all stored ones; founded: genesis was just created, so no lease was ever granted; alone: every member that
    held a lease is known to be dead. In both cases there is no announcement to wait for.
    """
    terms = replace(terms, outer=replace(terms.outer, momentum=view.newest.momentum))
    alone = alone or founded
    pending = {header.identity: (header, now) for header in headers if not view.has_decided(header.identity)}
    contributed = {key.member for key in (*view.verdicts, *(identity.incarnation for identity in pending))}
    lately = {
        key.member
        for key, (_, version) in view.verdicts.items()
        if not alone and version > view.version - AWAITED_RECORD_COUNT
    }
    state = CoordinatorState(
        terms=terms,
        view=view,
        epoch=view.newest.epoch + (not founded),
        recovering_until=-math.inf if alone else now + terms.lease_seconds,
        # Without them the member that pushed last would be the whole quorum until the others have announced themselves.
        awaited=frozenset(lately.union(terms.members)),
        awaited_until=now + (terms.timeouts.first_deadline_s if alone else terms.lease_seconds),
        pending=HashTrieMap(pending),
        contributed=HashTrieSet(contributed),
        processed=HashTrieMap(view.processed),
    )
    return with_claims(state)


def heartbeat(
    state: CoordinatorState, report: Heartbeat, now: float
) -> tuple[CoordinatorState, Granted | Refused | Superseded]:
    """Renew or grant a lease, or refuse."""
    key, view = report.incarnation, state.view
    if report.base > view.version:
        return state, Superseded(report.base)
    if key in state.fenced:
        return state, Refused("fenced: its lease expired, or its member came back as a new incarnation")
    if report.digests != state.terms.digests:
        return state, Refused(disagreement(report.digests, state.terms.digests))
    if report.undecided and report.undecided.incarnation != key:
        return state, Refused(f"{report.undecided} is a push of another incarnation")
    verdict = view.verdict(report.undecided) if report.undecided else None
    ruled = verdict.rows if verdict else NO_ROWS  # decided, but the member does not know yet
    outstanding = report.outstanding - ruled
    if key not in state.leases:
        rows = NO_ROWS
        if report.joined:
            if not state.recovering:
                return state, Refused("it was silent for too long: what it had not pushed went to others")
            if outstanding & view.spent:
                return state, Refused(f"its rows {outstanding & view.spent} are already counted or skipped")
            claimed = report.todo | outstanding
            if verdict and verdict.fate == "returned":
                claimed |= ruled
            rows = claimed - view.spent
            if rows and rows.ranges[-1][1] > (end := state.terms.horizon + len(view.skipped)):
                return state, Refused(f"its rows {rows} were never leased: the run has {end}")
            if others := held_by_others(state, key, rows):
                return state, Refused(f"its rows {others} are claimed by others")
        elif key.member in state.seen:
            state = without_leases(state, [holder for holder in state.leases if holder.member == key.member])
    elif strange := outstanding - state.leases[key].rows:
        return state, Refused(f"rows {strange} are not leased to it")
    else:
        rows = state.leases[key].rows
    fastest = max(report.rows_per_s or 0.0, state.fastest or 0.0) or None
    cycle = cycle_of(state.terms, report.rows_per_s, fastest)
    is_far = bool(person_of(key.member))
    exchange_s = min(report.exchange_s, MAX_EXCHANGE_S) if is_far else 0.0
    if not state.recovering:
        share = (state.terms.horizon - len(view.counted)) // (len(state.leases) + 1)
        until_verdict_s = max(2 * exchange_s, state.far_cycle_s)
        ahead = max(2 * cycle, min(share, _rows_ahead(cycle, report.rows_per_s, until_verdict_s)))
        ahead = -(-ahead // state.terms.batch) * state.terms.batch
        missing = min(ahead - len(rows - accepted_rows(state, report.undecided)), state.room)
        if missing > 0:
            rows |= state.taken.free(missing)
    pause = min(max(1, len(state.leases)) / MAX_HEARTBEATS_PER_S, state.terms.lease_seconds / 2)
    least_s = PERSON_LEASE_S if is_far else 0.0
    until = now + max(state.terms.lease_seconds, least_s, MIN_LEASE_PAUSES * pause)
    if key in state.leases and report.stalled > _max_stall_s(state.terms.timeouts, cycle, report.rows_per_s):
        until = state.leases[key].until  # its devices hang: let the lease expire, or its rows would never come back
    news = report.processed > state.processed.get(key, -1)
    held = Lease(rows, until, report.base, report.rows_per_s, outstanding, exchange_s)
    state = updated(
        state,
        leases=state.leases.insert(key, held),
        taken=state.taken | rows,
        fastest=fastest,
        seen=state.seen.insert(key.member),
        processed=state.processed.insert(key, report.processed) if news else state.processed,
    )
    undecided = report.undecided
    known = undecided is None or view.has_decided(undecided) or undecided in state.pending or undecided in state.storing
    return state, Granted(
        rows=rows,
        cycle=cycle,
        version=view.version,
        tokens=view.newest.tokens,
        state=view.newest.state if view.version > report.base else (),
        verdict=verdict,
        unknown=not known,
        pause=pause,
        ended=state.ended,
    )


def receive_push(
    state: CoordinatorState, header: Header
) -> tuple[CoordinatorState, StoreHeader | Accepted | Refused | Superseded]:
    """Check a contribution whose payload is stored. A repeated push gets the same answer."""
    key, identity, view = header.identity.incarnation, header.identity, state.view
    if header.base > view.version:
        return state, Superseded(header.base)
    if view.has_decided(identity):
        return state, StoreHeader(header)  # a stored header exists already; comparing with it finds other digests
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
    if state.storing.get(identity) == header:
        return state, StoreHeader(header)
    if key in state.undecided:
        return state, Refused("another of its pushes is still undecided")
    if identity.sequence != (following := view.decided_pushes(key) + 1):  # a skipped push would never get a verdict
        return state, Refused(f"its push {identity.sequence} is not the next: that is push {following}")
    if len(header.digests) != len(view.newest.state):
        return state, Refused(f"it has {len(header.digests)} fragments, not {len(view.newest.state)}")
    storing, undecided = state.storing.insert(identity, header), state.undecided.insert(key, (identity,))
    return updated(state, storing=storing, undecided=undecided), StoreHeader(header)


def header_stored(state: CoordinatorState, header: Header, now: float) -> CoordinatorState:
    """Accept a contribution: its header was created, or exists with the same bytes."""
    identity, key = header.identity, header.identity.incarnation
    storing, undecided = state.storing.discard(identity), state.undecided.get(key, ())
    if state.view.has_decided(identity):
        left = tuple(other for other in undecided if other != identity)
        rest = state.undecided.insert(key, left) if left else state.undecided.discard(key)
        return updated(state, storing=storing, undecided=rest)
    return updated(
        state,
        storing=storing,
        pending=state.pending.insert(identity, (header, now)),
        undecided=state.undecided if identity in undecided else state.undecided.insert(key, (*undecided, identity)),
        contributed=state.contributed.insert(key.member),
    )


def accept_stored(state: CoordinatorState, headers: Iterable[Header], now: float) -> CoordinatorState:
    """Accept undecided contributions that were found in the storage: another coordinator had accepted them."""
    for header in headers:
        state = header_stored(state, header, now)
    return with_claims(state)


def leave(state: CoordinatorState, key: Incarnation) -> CoordinatorState:
    """End a member's lease; rows that it has not pushed can be leased again."""
    return without_leases(state, [key]) if key in state.leases else state


def tick(state: CoordinatorState, now: float) -> tuple[CoordinatorState, Merge | None, RoundStatus]:
    """Apply the passage of time: end recovery, expire leases, end a round."""
    if state.recovering and now >= state.recovering_until:
        state = updated(state, recovering_until=-math.inf)
    if not state.recovering:
        state = without_leases(state, [key for key, lease in state.leases.items() if lease.until <= now])
    if now >= state.awaited_until:
        state = updated(state, seen=state.seen.update(state.awaited), awaited=frozenset())
    speeds = [lease.rows_per_s for lease in state.leases.values() if lease.rows_per_s]
    is_far = any(lease.exchange_s for lease in state.leases.values())
    far_cycle_s = state.median_cycle if is_far else None
    state = updated(state, fastest=max(speeds, default=None), far_cycle_s=far_cycle_s or 0.0)
    when = state.round_status(now)
    if state.merging or not when.is_over:
        return state, None, when
    merge = _merge(state, [header for header, _ in state.pending.values()], when.reason)
    return updated(state, merging=merge), merge, when


def retry_merge(
    state: CoordinatorState, lost: Iterable[Identity], rejected: Mapping[Identity, str] = MappingProxyType({})
) -> tuple[CoordinatorState, Merge]:
    """Choose again among the same contributions: the merge found payloads missing, or some that must not count."""
    merging = state.merging
    assert merging is not None
    state = updated(
        state, unreadable=state.unreadable | frozenset(lost), rejected=state.rejected.update(HashTrieMap(rejected))
    )
    headers = [state.pending[decision.identity][0] for decision in merging.decisions]
    merge = _merge(state, headers, merging.reason)
    return updated(state, merging=merge), merge


def untrue_norms(state: CoordinatorState, squares: Mapping[Identity, float]) -> dict[Identity, str]:
    """Return the contributions of the merge under way whose header states another norm than their payload has.

    squares: the squared norms of payloads.
    """
    return {
        identity: UNTRUE_NORM
        for identity, square in squares.items()
        if not math.isclose(math.sqrt(square), state.pending[identity][0].norm, rel_tol=NORM_TOLERANCE)
    }


def make_record(
    state: CoordinatorState,
    parent: str,
    fragments: tuple[str, ...],
    outer: tuple[str, ...],
    updates: tuple[str, ...],
    time: float,
) -> Record:
    """Return the record to create from the shards' results; then report to `record_committed`."""
    merge, view = state.merging, state.view
    assert merge is not None
    applied = [decision for decision in merge.decisions if decision.fate == "applied"]
    made_by = merge.outer if applied else view.newest  # without contributors the record repeats the last one
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
        processed=tuple(sorted(item for item in state.processed.items() if view.processed.get(item[0]) != item[1])),
        digests=state.terms.digests,
        time=time,
        downlink=made_by.downlink,
        updates=updates,
        averaged=made_by.averaged,
        kept=merge.kept if applied else view.newest.kept,
    )


def record_committed(state: CoordinatorState, record: Record) -> CoordinatorState:
    """Apply a record that was created, or exists with the same bytes."""
    view = state.view.after(record)
    gone = {decision.identity for decision in record.decisions}
    void = {decision.identity.incarnation: decision.rows for decision in record.decisions if decision.fate == "void"}
    leases = {
        key: replace(lease, rows=lease.rows - view.spent - void.get(key, NO_ROWS))
        for key, lease in state.leases.items()
    }
    applied = (each for each in record.decisions if each.fate == "applied" and each.identity in state.pending)
    norms = (each.clip * state.pending[each.identity][0].norm for each in applied)
    pending = {identity: waiting for identity, waiting in state.pending.items() if identity not in gone}
    state = updated(
        state,
        view=view,
        leases=HashTrieMap(leases),
        pending=HashTrieMap(pending),
        norms=(*state.norms, *norms)[-MAX_USUAL_NORMS:],
        merging=None,
        unreadable=state.unreadable - gone,
        rejected=HashTrieMap({identity: why for identity, why in state.rejected.items() if identity not in gone}),
    )
    return with_claims(state)


def _merge(state: CoordinatorState, headers: Iterable[Header], reason: str) -> Merge:
    decisions = choose(state.view, headers, state.unreadable, state.terms.staleness, state.rejected, state.norms)
    weights = [decision.weight for decision in decisions if decision.fate == "applied"]
    # One momentum step for as many contributions as there are live members. Members that take turns would otherwise
    # make two steps instead of one, which ruins a model.
    need = max(state.terms.timeouts.min_quorum, len(state.live))
    share, gathered = advance_quorum(state.terms.outer, state.view.newest.gathered, len(weights), need)
    outer = state.terms.outer
    rate = outer.rate_for(effective(weights), share) if weights else 0.0
    tokens = sum(decision.tokens for decision in decisions if decision.fate == "applied")
    kept = outer.average.kept(tokens, state.view.tokens + tokens) if outer.average and weights else None
    return Merge(state.view.version + 1, tuple(decisions), outer, rate, share, gathered, kept, reason)


def _rows_ahead(cycle: int, rows_per_s: float | None, until_verdict_s: float) -> int:
    """Return how many rows a member holds ahead, so that it waits neither for its network nor for that of others.

    Besides the rows of the last push it needs those that it trains until the verdict is adopted. Two cycles are enough
    if that takes less than a cycle. Otherwise its pushes become larger and rarer.
    """
    return cycle + math.ceil(max(cycle, min(until_verdict_s * (rows_per_s or 0.0), MAX_LEASED_CYCLES * cycle)))


def _max_stall_s(timeouts: RoundTimeouts, cycle: int, rows_per_s: float | None) -> float:
    if not rows_per_s:
        return timeouts.first_stall_s
    return timeouts.min_stall_s + timeouts.stall_cycles * cycle / rows_per_s


def disagreement(theirs: Digests, ours: Digests) -> str:
    """Describe how a member's digests differ from the run's."""
    names = [name for name in ("layout", "config", "data", "code") if getattr(theirs, name) != getattr(ours, name)]
    return f"its {' and '.join(names)} {'differs' if len(names) == 1 else 'differ'} from the run's"
