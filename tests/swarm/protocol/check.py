"""The invariants of every state and every commit."""

from fractions import Fraction

from tests.swarm.protocol.state import Config, Ledger, State, add, facts, require, scaled_sum, subtract, trained


def check_commit(ledger: Ledger) -> None:
    """Require that each contribution and each row is decided once, and that the parameters follow from the record."""
    verdicts = [verdict for record in ledger for verdict in record.verdicts]
    identities = [verdict.header.identity for verdict in verdicts]
    rows = [row for item in verdicts if item.fate in ("applied", "dropped") for row in item.header.rows]
    require(len(identities) == len(set(identities)), f"a contribution has two verdicts: {identities}")
    require(len(rows) == len(set(rows)), f"a row is counted or skipped twice: {sorted(rows)}")
    expected = ledger[-2].shared
    for header, fate, weight in ledger[-1].verdicts:
        if fate == "applied":
            learnt = subtract(header.payload, ledger[header.base].shared)
            require(learnt == trained(header.rows, header.owner), f"the payload of {header} holds other rows")
            expected = scaled_sum(weight, learnt, expected)
    require(expected == ledger[-1].shared, "the parameters do not follow from the record")
    require(all(basis[0] != "nan" for basis, _ in ledger[-1].shared), "NaN in the shared parameters")


def check(state: State, config: Config) -> None:
    known = facts(state.ledger)
    require(state.ledger[-1].shared in state.objects, "the newest version is deleted")
    for number, member in enumerate(state.members):
        if not member.is_alive:
            continue
        owner, name = (number, member.incarnation), f"m{number}.{member.incarnation}"
        expected = trained(member.outstanding, owner)
        if member.is_poisoned:
            expected = add(frozenset({(("nan", *owner), Fraction(1))}), expected)
        learnt = subtract(member.params, state.ledger[member.base].shared)
        require(learnt == expected, f"{name} reports {sorted(member.outstanding)}, its parameters hold other rows")
        require(member.own_tokens == len(member.outstanding), f"the schedule of {name} is off")
    for coordinator in filter(None, state.coordinators):
        if coordinator.ledger == state.ledger:
            leased = [row for _, rows in coordinator.leases for row in rows]
            require(len(leased) == len(set(leased)), f"a row is leased twice: {sorted(leased)}")
            require(not set(leased) & known.decided, f"a decided row is leased: {sorted(leased)}")
    alive = [coordinator for coordinator in state.coordinators if coordinator and coordinator.ledger == state.ledger]
    if len(alive) == 1 and state.faults.second_coordinator == config.faults.second_coordinator:
        for header in state.headers:
            if header.identity not in known.fates:
                taken = {row for owner, rows in alive[0].leases if owner != header.owner for row in rows}
                require(not taken & header.rows, f"rows of the accepted {header} are leased to another member")
