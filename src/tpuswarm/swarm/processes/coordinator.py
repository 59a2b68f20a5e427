"""The coordinator's process: it founds the run, then drives core/transitions.py with ledger and aggregators."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core import transitions as core
from tpuswarm.swarm.core.choose import FALSELY_FINITE
from tpuswarm.swarm.core.coordinator_state import CoordinatorState
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.messages import (
    Accepted,
    Granted,
    Heartbeat,
    Merge,
    PayloadsLost,
    PayloadsNotFinite,
    Refused,
    StoreHeader,
    Superseded,
    Terms,
    VersionDamaged,
)
from tpuswarm.swarm.core.summary import Summary, summary
from tpuswarm.swarm.core.values import Digests, Header, Identity, Incarnation, Record
from tpuswarm.swarm.processes.aggregator import sum_by_identity
from tpuswarm.swarm.processes.clock import Clock
from tpuswarm.swarm.processes.effects import Call, Parallel, Process, ProcessEnded, RunBlocking, Sleep, Unreachable
from tpuswarm.swarm.processes.requests import Digest, MemberName, request
from tpuswarm.swarm.processes.run_plan import RunPlan
from tpuswarm.swarm.storage.founding import FOUNDING, Founding, keep_founding, read_founding
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import object_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import newest_whole
from tpuswarm.train.process.terminal import echo

MAX_SLEEP_S = 0.5
MIN_SLEEP_S = 0.001
"""A shorter sleep may be lost in rounding."""
FOUNDER_TIMEOUT_S = 120.0
"""A member that was asked to initialize the model has this long; it has compiled its program before."""
FOUNDING_POLL_S = 0.2


class Coordinator:
    """One life of a coordinator. Call `open`, then `run` beside the methods that members call."""

    def __init__(self, ledger: Ledger, shards: Sequence[str], clock: Callable[[], float], time: Callable[[], float]):
        """clock: monotonic seconds, for leases and rounds; time: seconds since 1970, for the records."""
        self._ledger, self._shards = ledger, tuple(shards)
        self.clock, self._time, self._founded = Clock(clock), time, False
        self._appending = 0
        """The version whose record this coordinator has begun to create."""
        self.opened = False
        self.state: CoordinatorState
        """Set by `open`."""

    def open(self, terms: Terms, *, founded: bool, alone: bool = False) -> Process:
        """Read the ledger and the stored headers; every stored header is accepted, whether its member lives or not.

        founded: genesis was just created; alone: no member of an earlier epoch can be alive.
        """
        self._founded = founded
        view = yield RunBlocking("coordinator reads the ledger", self._ledger.view)
        headers = yield from self._stored_headers(view)
        self.state = core.start_epoch(terms, view, headers, self.clock(), founded=founded, alone=alone)
        self.opened = True

    @request
    def beat(self, report: Heartbeat) -> Granted | Refused | Process | None:
        """Answer a member's hello, announcement or heartbeat; None while the ledger is being read."""
        if not self.opened:
            return None
        self.state, answer = core.heartbeat(self.state, report, self.clock())
        return self._refuse_version(answer) if isinstance(answer, Superseded) else answer

    @request
    def push(self, header: Header) -> Process:
        """Accept or refuse a contribution whose payload is stored; None while the ledger is being read."""
        if not self.opened:
            return None
        self.state, answer = core.receive_push(self.state, header)
        if isinstance(answer, Superseded):
            return (yield from self._refuse_version(answer))
        if not isinstance(answer, StoreHeader):
            return answer
        outcome = yield RunBlocking("coordinator creates a header", lambda: self._ledger.create_header(header))
        if outcome == "lost":
            return Refused("a different push with the same identity is stored")
        self.state = core.header_stored(self.state, header, self.clock())
        return Accepted()

    @request
    def leave(self, incarnation: Incarnation) -> None:
        if self.opened:
            self.state = core.leave(self.state, incarnation)

    def _refuse_version(self, answer: Superseded) -> Process:
        """Refuse a version that does not exist. Raise ProcessEnded if another coordinator has made it."""
        yield from self._require_newest()
        return Refused(f"there is no commit {answer.version}: the newest is {self.state.view.version}")

    def _require_newest(self) -> Process:
        """Raise ProcessEnded if another coordinator has created the next record."""
        following = self.state.view.version + 1
        exists = yield RunBlocking("coordinator looks for a newer record", lambda: self._ledger.exists(following))
        if exists and following > self.state.view.version and following != self._appending:
            raise ProcessEnded(f"commit {following} exists: another coordinator is in charge; this one stops")

    def summarize(self) -> Summary | None:
        """Summarize the run; None before its first state."""
        return summary(self.state, self.clock()) if self.opened else None

    def run(self) -> Process:
        """Commit round after round until the end of the run.

        Raise ProcessEnded if another coordinator has taken over, or the newest version is damaged.
        """
        if not self._founded:
            yield from self._call_shards("check", self.state.view.newest)
        checked = self.clock()
        while not (self.state.ended and (yield from self._all_decided())):
            self.state, merge, round_status = core.tick(self.state, self.clock())
            if not self.state.leases and self.clock() >= checked + self.state.terms.lease_seconds:
                yield from self._require_newest()  # no member would report that another coordinator has taken over
                checked = self.clock()
            if merge:
                yield from self._commit(merge)
            else:
                yield Sleep(max(MIN_SLEEP_S, min(MAX_SLEEP_S, round_status.check_at - self.clock())))

    def _stored_headers(self, view: LedgerView) -> Process:
        """Return the stored headers without a verdict. Raise ProcessEnded if one starts from a newer version."""
        headers = yield RunBlocking("coordinator lists headers", lambda: self._ledger.headers(view))
        if newer := [header.base for header in headers if header.base > view.version]:
            raise ProcessEnded(f"a push starts from commit {max(newer)}: another coordinator is in charge; this stops")
        return headers

    def _all_decided(self) -> Process:
        """Whether each stored header has a verdict; accept those of another coordinator that have none."""
        headers = yield from self._stored_headers(self.state.view)
        self.state = core.accept_stored(self.state, headers, self.clock())
        return self.state.ended

    def _commit(self, merge: Merge) -> Process:
        while True:
            results = yield from self._call_shards("merge", self.state.view.newest, merge)
            lost, bad = (
                frozenset[Identity]().union(*(part.identities for part in results if isinstance(part, kind)))
                for kind in (PayloadsLost, PayloadsNotFinite)
            )
            rejected = dict.fromkeys(bad, FALSELY_FINITE)
            if not lost and not bad:
                squares = sum_by_identity(part.squares for part in results)
                rejected = core.untrue_norms(self.state, squares)
            if not lost and not rejected:
                break
            self.state, merge = core.retry_merge(self.state, lost, rejected)
        state = {number: digest for part in results for number, digest in part.state.items()}
        outer = {number: digest for part in results for number, digest in part.outer.items()}
        updates = {number: digest for part in results for number, digest in part.updates.items()}
        record = core.make_record(
            self.state,
            self._ledger.digest(self.state.view.newest),
            _in_order(state),
            _in_order(outer),
            _in_order(updates),
            self._time(),
        )
        self.state.view.after(record)  # raises if it does not follow, before it is stored for ever
        self._appending = record.version
        outcome = yield RunBlocking("coordinator creates a record", lambda: self._ledger.append(record))
        if outcome == "lost":
            raise ProcessEnded(f"another coordinator wrote record {record.version}; this one stops")
        self.state = core.record_committed(self.state, record)
        if self._ledger.bookmark_due(self.state.view):
            yield RunBlocking("coordinator leaves a bookmark", partial(self._leave_bookmark, self.state.view))

    def _leave_bookmark(self, view: LedgerView) -> None:
        try:
            self._ledger.bookmark(view)
        except RunFailed as error:
            echo(f"no bookmark at commit {view.version}: {error}", err=True)

    def _call_shards(self, method: str, *arguments: Any) -> Process:
        """Call all aggregators at once, repeat unanswered calls, and return all answers."""
        found: dict[str, Any] = {}
        while left := [shard for shard in self._shards if shard not in found]:
            answers = yield Parallel(tuple(Call(shard, method, arguments) for shard in left))
            for shard, answer in zip(left, answers, strict=True):
                if isinstance(answer, VersionDamaged):
                    advice = partial(self._advise, answer)
                    raise ProcessEnded((yield RunBlocking("coordinator looks for a whole version", advice)))
                if isinstance(answer, Refused):
                    raise RunFailed(f"{shard}: {answer.reason}")
                if not isinstance(answer, Unreachable):
                    found[shard] = answer
            if len(found) < len(self._shards):
                yield Sleep(MAX_SLEEP_S)
        return list(found.values())

    def _advise(self, damage: VersionDamaged) -> str:
        try:
            intact = newest_whole(self._ledger.store)
            way_out = f"a new run with `--init-from` starts from commit {intact}, which is intact"
        except RunFailed as error:
            way_out = str(error)
        return f"commit {self.state.view.version} is damaged: {damage.reason}; {way_out}"


@dataclass(frozen=True)
class Begin:
    """Answer to a hello: the run has no first state; create it."""


@dataclass(frozen=True)
class Wait:
    """Answer to a hello: another member creates the first state, or the coordinator is still reading its ledger."""


@dataclass(frozen=True)
class Joining:
    """Answer to a hello: the run's terms and its newest version."""

    terms: Terms
    founding: Founding
    version: int
    tokens: int
    state: tuple[str, ...]


class FoundingCoordinator(Coordinator):
    """A coordinator that first waits until a member has created the run's first state."""

    def __init__(
        self,
        plan: RunPlan,
        store: Store,
        shards: Sequence[str],
        clock: Callable[[], float],
        time: Callable[[], float],
        *,
        alone: bool,
    ):
        """alone: no member of an earlier epoch can be alive, so none is awaited."""
        super().__init__(Ledger(store), shards, clock, time)
        self._plan, self._store, self._alone = plan, store, alone
        self._founding: Founding | None = None
        self._is_unfounded = False
        """Whether storage was read and has no first state."""
        self._founder: tuple[str, float] | None = None

    def run(self) -> Process:
        """Run to the end; raise ProcessEnded as Coordinator.run does, or if the storage has another run's commits."""
        founded = False
        while True:
            founding = yield RunBlocking("coordinator reads the founding", lambda: read_founding(self._store))
            if founding is not None:
                break
            founded = self._is_unfounded = True
            yield Sleep(FOUNDING_POLL_S)
        self._is_unfounded = False
        self._shards = self._shards[: len(founding.fragments)]
        terms = self._plan.terms(founding)
        yield from self.open(terms, founded=founded, alone=self._alone)
        newest = self.state.view.newest
        if newest.run != terms.run:
            raise ProcessEnded(
                f"{self._store.root} has commits of run {newest.run}, this is run {terms.run}; use another --run"
            )
        if newest.digests.layout != founding.layout.digest:
            raise ProcessEnded(
                f"{self._store.root} has commits with another layout than its {FOUNDING}; use another --run"
            )
        self._founding = founding
        yield from super().run()

    @request
    def hello(self, member: MemberName, can_found: bool = True) -> Joining | Begin | Wait:
        """Answer a member's first call. can_found: the member could create the first state now."""
        if self._founding:
            newest = self.state.view.newest
            return Joining(self.state.terms, self._founding, newest.version, newest.tokens, newest.state)
        now = self.clock()
        if not self._is_unfounded or not can_found or (self._plan.members and member not in self._plan.members):
            return Wait()  # the founder is one of the members that the run was started with, if there are any
        if self._founder is None or self._founder[0] == member or now > self._founder[1]:
            self._founder = (member, now + FOUNDER_TIMEOUT_S)
            return Begin()
        return Wait()

    @request
    def found(
        self, founding: Founding, state: tuple[Digest, ...], outer: tuple[Digest, ...], digests: Digests
    ) -> Process:
        """Create the first record; a second founder finds it there and uses it. Refuse a founder of another run.

        The record is stored before the founding: a kill between them leaves a run without members, whose layout the
        next founder reports.
        """
        terms = self._plan.terms(founding)
        if digests != terms.digests:
            return Refused(core.disagreement(digests, terms.digests))
        if len(state) != len(founding.fragments) or len(outer) not in (0, len(state)):
            return Refused(f"it has {len(state)} fragments, its layout has {len(founding.fragments)}")
        objects = [object_name(digest) for digest in (*state, *outer)]
        exist = yield RunBlocking("coordinator looks for the state", lambda: all(map(self._store.exists, objects)))
        if not exist:
            return Refused("its first state is not stored")
        record = Record(
            run=terms.run, version=0, epoch=1, parent="", state=state, outer=outer, decisions=(),
            rule=terms.outer.rule, rate=0.0, momentum=terms.outer.momentum, share=0.0, gathered=0.0, tokens=0,
            changes=0, processed=(), digests=terms.digests, time=self._time(), averaged=terms.outer.averaged,
            kept=1.0 if terms.outer.average else None,
        )  # fmt: skip
        outcome = yield RunBlocking("coordinator creates genesis", lambda: self._ledger.append(record))
        if outcome == "lost":
            stored = yield RunBlocking("coordinator reads genesis", lambda: self._ledger.record(0))
            if (stored.run, stored.digests.layout) != (terms.run, digests.layout):
                return Refused(f"commit 0 in {self._store.root} belongs to another run; use another --run")
        yield RunBlocking("coordinator keeps the founding", lambda: keep_founding(self._store, founding))
        return Accepted()


def _in_order(digests: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(digests[number] for number in sorted(digests))
