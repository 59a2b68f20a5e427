"""The transitions of the model: each is one atomic step of one process; a crash may come between any two.

Not modelled: clocks (a lease may expire and a round may close at any time), clipping, momentum, fragments,
quantization.
"""

from collections.abc import Iterator
from fractions import Fraction

from tests.swarm.protocol.check import check_commit
from tests.swarm.protocol.state import (
    NONE,
    Config,
    Coordinator,
    Header,
    Member,
    Record,
    Rows,
    State,
    Verdict,
    add,
    facts,
    require,
    scaled_sum,
    subtract,
    trained,
)


def transitions(state: State, config: Config) -> Iterator[tuple[str, State]]:
    for number, member in enumerate(state.members):
        yield from member_steps(state, config, number, member)
    for number, coordinator in enumerate(state.coordinators):
        if coordinator is None:
            yield from start_coordinator(state, config, number)
        else:
            yield from coordinator_steps(state, config, number, coordinator)


def new_incarnation(state: State, member: Member) -> Member:
    version = len(state.ledger) - 1
    params = state.ledger[-1].shared
    return Member(member.incarnation + 1, base=version, params=params, coordinator=member.coordinator)


def member_steps(state: State, config: Config, number: int, member: Member) -> Iterator[tuple[str, State]]:
    owner, name = (number, member.incarnation), f"m{number}.{member.incarnation}"
    if not member.is_alive:
        yield f"{name} restarts", state.member(number, new_incarnation(state, member))
        return
    if state.faults.member_crash:
        dead = Member(member.incarnation, is_alive=False, coordinator=member.coordinator)
        yield f"{name} dies", state.member(number, dead).spend("member_crash")
    if member.lease and (config.has_overlap or member.undecided is None):
        row = frozenset({min(member.lease)})
        after = member._replace(
            lease=member.lease - row,
            outstanding=member.outstanding | row,
            params=add(trained(row, owner), member.params),
            own_tokens=member.own_tokens + 1,
        )
        yield f"{name} trains {min(row)}", state.member(number, after)
        if state.faults.poisoned_row and not member.is_poisoned:
            params = add(frozenset({(("nan", *owner), Fraction(1))}), after.params)
            poisoned = after._replace(is_poisoned=True, params=params)
            yield f"{name} trains {min(row)}: NaN", state.member(number, poisoned).spend("poisoned_row")
    is_full = len(member.outstanding) >= config.cycle
    is_last = member.outstanding and not member.lease
    if config.without == "short first contribution" and member.sequence == 1:
        is_last = False
    if member.undecided is None and (is_full or is_last):
        rows = member.outstanding
        header = Header(owner, member.sequence, member.base, rows, not member.is_poisoned, member.params)
        pushed = member._replace(undecided=(header, member.params), sequence=member.sequence + 1)
        yield f"{name} pushes {header}", state.member(number, pushed)._replace(network=state.network | {header})
    fates, newest = facts(state.ledger).fates, len(state.ledger) - 1
    if member.undecided and member.undecided[0].identity in fates:
        fate = fates[member.undecided[0].identity]
        yield f"{name} hears {fate}", state.member(number, adopt_verdict(state, config, member, fate))
    if member.undecided and config.without == "only the ledger returns":
        header = member.undecided[0]
        for coordinator in filter(None, state.coordinators):
            if header.identity not in facts(coordinator.ledger).fates and header not in coordinator.pending:
                after = adopt_verdict(state, config, member, "returned")
                yield f"{name} hears that {header} is unknown", state.member(number, after)
    if member.undecided is None and newest > member.base:
        change = subtract(state.ledger[-1].shared, state.ledger[member.base].shared)
        adopted = member._replace(params=add(change, member.params), base=newest)
        yield f"{name} adopts {newest}", state.member(number, adopted)
    for index, coordinator in enumerate(state.coordinators):
        if coordinator is None:
            continue
        if member.base > len(coordinator.ledger) - 1:
            yield f"C{index} meets a newer version and exits", state.coordinator(index, None)
        elif index == member.coordinator or state.coordinators[member.coordinator] is None:
            yield from heartbeat(state, config, number, index, coordinator)
        elif state.faults.switched_coordinator:
            yield from heartbeat(state.spend("switched_coordinator"), config, number, index, coordinator)


def adopt_verdict(state: State, config: Config, member: Member, fate: str) -> Member:
    """Return the member after it heard a verdict, at the newest version."""
    assert member.undecided is not None
    header, snapshot = member.undecided
    newest, later = len(state.ledger) - 1, member.outstanding - header.rows
    shared = state.ledger[newest].shared
    heard = member._replace(undecided=None, base=newest)
    if fate == "applied":
        params = add(subtract(shared, snapshot), member.params)
        return heard._replace(params=params, outstanding=later, own_tokens=len(later))
    if fate == "returned":
        return heard._replace(params=add(subtract(shared, state.ledger[member.base].shared), member.params))
    if member.is_poisoned:
        return new_incarnation(state, member)
    if config.without == "train again after dropped":
        return heard._replace(params=shared, outstanding=later, own_tokens=len(later))
    return heard._replace(params=shared, outstanding=NONE, lease=member.lease | later, own_tokens=0)


def heartbeat(
    state: State, config: Config, number: int, index: int, coordinator: Coordinator
) -> Iterator[tuple[str, State]]:
    """Hello, announcement and heartbeat are one idempotent call; the reply is the whole lease."""
    member, known = state.members[number], facts(coordinator.ledger)
    owner, name = (number, member.incarnation), f"m{number}.{member.incarnation}"
    refused = state.member(number, new_incarnation(state, member)._replace(coordinator=index))
    if owner in coordinator.fenced:
        yield f"C{index} refuses {name}: fenced", refused
        return
    fate = known.fates.get(member.undecided[0].identity) if member.undecided else None
    decided_rows = member.undecided[0].rows if member.undecided and fate else NONE  # decided, not heard yet
    held, rows = (member.lease | member.outstanding) - decided_rows, NONE
    leases, after = dict(coordinator.leases), coordinator
    if owner not in leases:
        if member.is_known:  # the coordinator restarted: the member announces what it holds
            if not coordinator.is_recovering:
                yield f"C{index} refuses {name}: unknown", refused
                return
            held |= decided_rows if fate == "returned" else NONE
            rows = held - known.decided
            others = coordinator.leased() | {
                row for header in coordinator.pending if header.owner != owner for row in header.rows
            }
            if rows & others or (member.outstanding - decided_rows) & known.decided:
                is_excused = state.faults.expired_lease != config.faults.expired_lease
                is_excused |= state.faults.second_coordinator != config.faults.second_coordinator
                is_excused |= config.faults.coordinator_crash - state.faults.coordinator_crash > 1
                require(is_excused, f"{name} was never fenced, but its rows were given away: {sorted(rows & others)}")
                yield f"C{index} refuses {name}: its rows are taken", refused
                return
        older = {item for item in leases if item[0] == number and item[1] < member.incarnation}
        after = coordinator.fence(older).lease(owner, rows)
    elif (member.outstanding - decided_rows) - leases[owner]:
        yield f"C{index} refuses {name}: rows are not leased to it", refused
        return
    rows = dict(after.leases)[owner]
    if not coordinator.is_recovering or config.without == "grant nothing while recovering":
        undecided = {row for header in after.pending if header.owner == owner for row in header.rows}
        rows |= leasable(after, config, 2 * config.cycle - len(rows - undecided))
        after = after.lease(owner, rows)
    granted = member._replace(lease=rows - member.outstanding, is_known=True, coordinator=index)
    replied = state.coordinator(index, after).member(number, granted)
    if replied != state:
        yield f"{name} and C{index}: rows {sorted(granted.lease)}", replied
    if after != state.coordinators[index] and state.faults.lost_reply:
        yield f"{name} to C{index}, reply lost", state.coordinator(index, after).spend("lost_reply")


def leasable(coordinator: Coordinator, config: Config, count: int) -> Rows:
    """Return the lowest rows that are not counted, skipped, accepted or leased, within the horizon."""
    known, taken = facts(coordinator.ledger), coordinator.accepted() | coordinator.leased()
    count = min(count, config.rows - len(known.counted) - len(taken - known.decided))
    free = (row for row in range(4 * config.rows) if row not in taken and row not in known.decided)
    return frozenset(row for row, _ in zip(free, range(count), strict=False))


def start_coordinator(state: State, config: Config, index: int) -> Iterator[tuple[str, State]]:
    is_second = state.coordinators[1 - index] is not None
    if (is_second and not state.faults.second_coordinator) or (index and not is_second):
        return
    fates = facts(state.ledger).fates
    pending = frozenset(header for header in state.headers if header.identity not in fates)
    if config.without == "list stored headers":
        pending = frozenset()
    started = state.coordinator(index, Coordinator(state.ledger, pending))
    yield f"C{index} starts", started.spend("second_coordinator") if is_second else started


def coordinator_steps(
    state: State, config: Config, index: int, coordinator: Coordinator
) -> Iterator[tuple[str, State]]:
    known, leases = facts(coordinator.ledger), dict(coordinator.leases)
    if state.faults.coordinator_crash:
        yield f"C{index} dies", state.coordinator(index, None).spend("coordinator_crash")
    if coordinator.is_recovering:
        yield f"C{index} has recovered", state.coordinator(index, coordinator._replace(is_recovering=False))
    for header in state.network:
        is_new = header not in coordinator.pending and header.identity not in known.fates
        is_leased = header.rows <= leases.get(header.owner, NONE)
        if config.without == "the coordinator accepts" and header not in state.headers:
            yield f"a shard accepts {header}", state._replace(headers=state.headers | {header})
        if is_new and is_leased and header.base <= len(coordinator.ledger) - 1:
            accepted = state.coordinator(index, coordinator._replace(pending=coordinator.pending | {header}))
            accepted = accepted._replace(headers=state.headers | {header}, lost_payloads=state.lost_payloads - {header})
            yield f"C{index} accepts {header}", accepted
    if not coordinator.is_recovering:
        for owner in leases:
            member = state.members[owner[0]]
            is_dead = not (member.is_alive and member.incarnation == owner[1])
            if is_dead or state.faults.expired_lease:
                fenced = state.coordinator(index, coordinator.fence({owner}))
                yield f"C{index} fences m{owner[0]}.{owner[1]}", fenced if is_dead else fenced.spend("expired_lease")
    if coordinator.chosen is not None:
        yield f"C{index} commits {len(coordinator.ledger)}", commit(state, config, index, coordinator)
    elif coordinator.pending:
        for headers in {coordinator.pending, *(frozenset({header}) for header in coordinator.pending)}:
            names = ", ".join(map(str, sorted(headers)))
            if after := choose(state, config, index, coordinator, headers):
                yield f"C{index} chooses {names}", after
            for header in headers if state.faults.lost_payload else ():
                lost = state._replace(lost_payloads=state.lost_payloads | {header}).spend("lost_payload")
                if after := choose(lost, config, index, coordinator, headers):
                    yield f"C{index} chooses {names}, but {header} cannot be read", after


def choose(
    state: State, config: Config, index: int, coordinator: Coordinator, headers: frozenset[Header]
) -> State | None:
    """Give each contribution its verdict and merge those that count; nobody sees the result before the commit."""
    known, ledger = facts(coordinator.ledger), coordinator.ledger
    taken, verdicts, weights = known.decided, [], {}
    for header in sorted(headers, key=lambda header: header.identity):
        staleness = known.changes[-1] - known.changes[header.base]
        if header.rows & taken and config.without != "check rows":
            require(
                state.faults.second_coordinator != config.faults.second_coordinator or config.without,
                f"{header} has decided rows although there never were two coordinators",
            )
            verdicts.append(Verdict(header, "void", Fraction(0)))
        elif not header.is_finite or staleness > config.max_staleness:
            verdicts.append(Verdict(header, "dropped", Fraction(0)))
            taken |= header.rows
        elif header in state.lost_payloads:
            verdicts.append(Verdict(header, "returned", Fraction(0)))
        else:
            weights[header] = Fraction(len(header.rows), 1 + staleness)
            taken |= header.rows
    require(weights or config.without != "records without contributors", "the sum of weights is 0")
    shared = frozenset() if weights else ledger[-1].shared
    for header, weight in weights.items():
        anchor, share = ledger[header.base].shared, weight / sum(weights.values())
        if anchor not in state.objects:
            require(ledger != state.ledger, f"the parameters of version {header.base} are needed, but deleted")
            return None
        shared = scaled_sum(share, add(header.payload, subtract(ledger[-1].shared, anchor)), shared)
        verdicts.append(Verdict(header, "applied", share))
    chosen = coordinator._replace(chosen=Record(tuple(verdicts), shared))
    return state.coordinator(index, chosen)._replace(objects=state.objects | {shared})


def commit(state: State, config: Config, index: int, coordinator: Coordinator) -> State:
    """Create the record if nobody has created that version, else exit."""
    record = coordinator.chosen
    assert record is not None
    if coordinator.ledger != state.ledger:
        return state.coordinator(index, None)
    ledger = (*state.ledger, record)
    check_commit(ledger)
    known = facts(ledger)
    void = {verdict.header.owner: verdict.header.rows for verdict in record.verdicts if verdict.fate == "void"}
    after = coordinator._replace(
        ledger=ledger,
        chosen=None,
        pending=coordinator.pending - {verdict.header for verdict in record.verdicts},
        leases=frozenset((owner, rows - known.decided - void.get(owner, NONE)) for owner, rows in coordinator.leases),
    )
    kept = {
        item.shared
        for version, item in enumerate(ledger)
        if known.changes[-1] - known.changes[version] < config.kept_versions
    }
    objects = state.objects - ({item.shared for item in ledger} - kept)
    return state.coordinator(index, after)._replace(ledger=ledger, objects=objects)
