"""Rebuild a run without some members' contributions: a new ledger in which these never counted."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.arithmetic.outer import OuterRule, gathered_after, initial_state
from tpuswarm.swarm.core.choose import effective
from tpuswarm.swarm.core.values import Decision, Header, Identity, Record
from tpuswarm.swarm.storage.ledger import Ledger, header_name, record_digest
from tpuswarm.swarm.storage.objects import Objects, object_name
from tpuswarm.swarm.storage.replay import ANY_AVERAGE, Unreplayable, replay
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

LEFT_OUT = "left out by `ledger rebuild`"
"""Reason of the verdict on a contribution that the rebuilt run does not count; its rows may be trained again."""

MAX_COMPUTED = 64
"""Arrays of the original run that stay in memory: a fragment's states from the oldest base on, and outer states."""


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild left out."""

    first: int
    """The first commit that differs."""
    newest: int
    contributions: int
    tokens: int
    """Counted before, and not any more."""


def rebuild(
    source: Store, target: Store, is_left_out: Callable[[str], bool], outer_lr: float | None, say: Callable[[str], None]
) -> Rebuilt:
    """Write the ledger and the arrays of a run without the contributions of some members.

    is_left_out: tells members by name; outer_lr: the run's own learning rate of the outer rule, None for the default;
    say: called with each step. The other contributions of a commit get the weight of those that leave. What a member
    sent is a change of the state that it started from, and counts as the same change of the rebuilt state. Raise
    InputError if there is nothing to leave out, RunFailed if arrays that are needed have been deleted.
    """
    say("reading the records")
    ledger = Ledger(source)
    view = ledger.view()
    records = list(ledger.records(range(view.version + 1)))
    changed = [record.version for record in records if any(_is_removed(d, is_left_out) for d in record.decisions)]
    if not changed:
        raise InputError(f"no commit of {source.root} counts a contribution of these members: nothing would change")
    work = _Rebuild(source, target, records, is_left_out, outer_lr)
    work.copy_until(changed[0] - 1, say)
    for version in range(changed[0], view.version + 1):
        say(f"computing commit {version} of {view.version}")
        work.make(version)
    for header in ledger.headers(view):  # accepted, and without a verdict
        if not is_left_out(header.identity.incarnation.member) and header.base < changed[0]:
            work.copy_push(header)
    return Rebuilt(changed[0], view.version, work.contributions, view.tokens - work.records[-1].tokens)


def _is_removed(decision: Decision, is_left_out: Callable[[str], bool]) -> bool:
    return decision.fate == "applied" and is_left_out(decision.identity.incarnation.member)


class _Rebuild:
    def __init__(
        self,
        source: Store,
        target: Store,
        records: list[Record],
        is_left_out: Callable[[str], bool],
        outer_lr: float | None,
    ):
        self._before = records
        self._source, self._old = source, Objects(source)
        self._ledger, self._new = Ledger(target), Objects(target)
        self._old_ledger = Ledger(source)
        self._is_left_out, self._outer_lr = is_left_out, outer_lr
        self._headers: dict[Identity, Header] = {}
        """Of the rebuilt run."""
        self.records: list[Record] = []
        """Of the rebuilt run, so far."""
        self.contributions = 0
        """Left out so far."""
        self._computed: OrderedDict[str, np.ndarray] = OrderedDict()
        """Arrays of the original run that were computed again, the newest last."""

    def copy_until(self, version: int, say: Callable[[str], None]) -> None:
        """Copy everything up to a version: records and headers, and the arrays that are still there."""
        say(f"copying commits 0 to {version}")
        for record in self._before[: version + 1]:
            for decision in record.decisions:
                self.copy_push(self._old_ledger.header(header_name(decision.identity)))
            for digest in (*record.state, *record.outer):
                self._copy_array(digest)
            for number, digest in enumerate(record.updates):
                self._copy_update(digest, record, number)
            self._append(record)

    def copy_push(self, header: Header) -> None:
        """Copy a header, and its payloads as far as they are still there."""
        for number, digest in enumerate(header.digests):
            try:
                payload = self._old.get_payload(header.identity, number, digest)
            except (Missing, Corrupt):
                continue
            self._new.put_payload(header.identity, number, payload, digest)
        self._accept(header)

    def make(self, version: int) -> None:
        """Compute a commit of the rebuilt run."""
        old = self._before[version]
        kept = [d for d in old.decisions if d.fate == "applied" and not _is_removed(d, self._is_left_out)]
        whole = math.fsum(decision.weight for decision in kept)
        decisions = []
        for decision in old.decisions:
            header = self._old_ledger.header(header_name(decision.identity))
            if _is_removed(decision, self._is_left_out):
                self.contributions += 1
                decision = replace(decision, fate="returned", reason=LEFT_OUT, weight=0.0, clip=1.0)
                self._accept(header)
            elif decision.fate == "applied":
                decision = replace(decision, weight=decision.weight / whole)
                self._accept(self._rebase(header, decision.base))
            else:
                self._accept(header)
            decisions.append(decision)
        newest = self.records[-1]
        record = replace(
            old,
            parent=record_digest(newest),
            decisions=tuple(decisions),
            tokens=newest.tokens + sum(decision.tokens for decision in kept),
            changes=newest.changes + bool(kept),
        )
        if kept:
            tokens = sum(decision.tokens for decision in old.decisions if decision.fate == "applied")
            rule = OuterRule(old.rule, old.momentum, rate=self._outer_lr if old.rule == "nesterov" else None)
            share = sum(decision.tokens for decision in kept) / tokens
            record = replace(
                record,
                rate=rule.rate_for(effective(decision.weight for decision in kept), old.share),
                kept=None if old.kept is None else old.kept**share,
                gathered=0.0 if old.rule == "average" else gathered_after(newest.gathered, old.share),
            )
            record = self._compute(record)
        else:
            record = replace(
                record, state=newest.state, outer=newest.outer, updates=(), rate=0.0, kept=newest.kept,
                share=old.share if newest.rule == "average" else 0.0, gathered=newest.gathered, rule=newest.rule,
                momentum=newest.momentum, downlink=newest.downlink, averaged=newest.averaged,
            )  # fmt: skip
        self._append(record)

    def _compute(self, record: Record) -> Record:
        """Return the record with its arrays, which are stored."""
        state, outer, updates = [], [], []
        known = [*self.records, record]
        for number in range(len(record.state)):
            try:
                made = replay(known.__getitem__, self._headers, record.version, number, self._array, self._payload)
            except Unreplayable as error:
                raise RunFailed(
                    f"commit {record.version} cannot be computed again: {error}; a run keeps what this needs with "
                    "`train --keep-payloads all`"
                ) from error
            state.append(self._new.put_array(made.state))
            if made.outer is not None:
                outer.append(self._new.put_array(made.outer))
            if made.update is not None:
                with self._new.writing_update(made.state.size, made.update.bits) as (room, finish):
                    room.codes[:], room.scales[:] = made.update.codes, made.update.scales
                    updates.append(finish())
        return replace(record, state=tuple(state), outer=tuple(outer), updates=tuple(updates))

    def _rebase(self, header: Header, base: int) -> Header:
        """Store a contribution's payload as the same change of the rebuilt base; return its header."""
        before, now = self._before[base].state, self.records[base].state
        digests = []
        for number, digest in enumerate(header.digests):
            try:
                payload: Mapping[str, np.ndarray] = self._old.get_payload(header.identity, number, digest)
            except (Missing, Corrupt) as error:
                raise RunFailed(
                    f"{error.name} was deleted or is damaged, so the run cannot be rebuilt; it keeps all payloads with "
                    "`train --keep-payloads all`"
                ) from error
            if "s" in payload and before[number] != now[number]:
                moved = self._array(now[number]) - self._old_array(before[number])
                payload = {"s": np.where(moved == 0, payload["s"], payload["s"] + moved)}
            digests.append(self._new.put_payload(header.identity, number, payload))
        return replace(header, digests=tuple(digests))

    def _old_array(self, digest: str) -> np.ndarray:
        """Return an array of the original run, computing it again if it was deleted."""
        if digest in self._computed:
            return self._computed[digest]
        try:
            return self._old.get_array(digest)
        except (Missing, Corrupt):
            pass
        version, number = self._made_by(digest)
        start = version
        while start and not self._is_there(self._before[start - 1], number):
            start -= 1
        for record in self._before[max(1, start) : version + 1]:
            if any(decision.fate == "applied" for decision in record.decisions):
                self._recompute_old(record, number)
        return self._computed[digest]

    def _made_by(self, digest: str) -> tuple[int, int]:
        """Return the commit that made an array, and the number of its fragment."""
        for record in self._before:
            for digests in (record.state, record.outer):
                if digest in digests:
                    return record.version, digests.index(digest)
        raise RunFailed(f"no commit of {self._source.root} has the array {digest[:12]}…")

    def _is_there(self, record: Record, number: int) -> bool:
        """Whether a commit's arrays of a fragment are there; the first outer state can always be made again."""
        digests = [*record.state[number : number + 1], *record.outer[number : number + 1]]
        if record.version == 0 and record.outer and self._source.exists(object_name(record.state[number])):
            rule = OuterRule(
                record.rule, downlink=record.downlink, average=None if record.kept is None else ANY_AVERAGE
            )
            first = initial_state(rule, self._old.get_array(record.state[number]))
            if first is not None:
                self._computed[record.outer[number]] = first
        return all(digest in self._computed or self._source.exists(object_name(digest)) for digest in digests)

    def _recompute_old(self, record: Record, number: int) -> None:
        try:
            made = replay(
                self._before.__getitem__, self._headers_of(record), record.version, number, self._old_array,
                self._old_payload,
            )  # fmt: skip
        except Unreplayable as error:
            raise RunFailed(
                f"the state of commit {record.version} cannot be computed again: {error}; a run keeps what this needs "
                "with `train --keep-payloads all`"
            ) from error
        self._computed[record.state[number]] = made.state
        if made.outer is not None:
            self._computed[record.outer[number]] = made.outer
        while len(self._computed) > MAX_COMPUTED:
            self._computed.popitem(last=False)

    def _headers_of(self, record: Record) -> dict[Identity, Header]:
        names = {d.identity: header_name(d.identity) for d in record.decisions if d.fate == "applied"}
        return {identity: self._old_ledger.header(name) for identity, name in names.items()}

    def _old_payload(self, header: Header, number: int) -> dict[str, np.ndarray] | None:
        try:
            return self._old.get_payload(header.identity, number, header.digests[number])
        except (Missing, Corrupt):
            return None

    def _array(self, digest: str) -> np.ndarray:
        """Return an array of the rebuilt run; up to where they part, it is one of the original run."""
        try:
            return self._new.get_array(digest)
        except (Missing, Corrupt):
            return self._old_array(digest)

    def _payload(self, header: Header, number: int) -> dict[str, np.ndarray]:
        return self._new.get_payload(header.identity, number, header.digests[number])

    def _copy_array(self, digest: str) -> None:
        with suppress(Missing, Corrupt):  # deleted long ago
            self._new.put_array(self._old.get_array(digest))

    def _copy_update(self, digest: str, record: Record, number: int) -> None:
        try:
            update = self._old.get_update(digest, self._old.get_array(record.state[number]).size)
        except (Missing, Corrupt):
            return
        with self._new.writing_update(update.codes.size * 8 // update.bits, update.bits) as (room, finish):
            room.codes[:], room.scales[:] = update.codes, update.scales
            finish()

    def _accept(self, header: Header) -> None:
        self._headers[header.identity] = header
        self._ledger.create_header(header)

    def _append(self, record: Record) -> None:
        self._ledger.append(record)
        self.records.append(record)
