"""Search the model: `explore` visits every state of a small swarm, `walk` takes one long random path."""

import random
from collections import defaultdict, deque

from tests.swarm.protocol.check import check
from tests.swarm.protocol.state import Config, Faults, State, Violation, facts
from tests.swarm.protocol.steps import transitions


def has_ended(state: State, config: Config) -> bool:
    """Enough tokens are counted, and nothing accepted is undecided (but by a coordinator that was fenced)."""
    known = facts(state.ledger)
    had_two = state.faults.second_coordinator != config.faults.second_coordinator
    return len(known.counted) >= config.rows and (
        had_two or all(header.identity in known.fates for header in state.headers)
    )


def forget_decided(state: State) -> State:
    """Drop messages whose verdict every coordinator knows: a repetition is answered from the ledger."""
    ledgers = [state.ledger, *(coordinator.ledger for coordinator in state.coordinators if coordinator)]
    known = [facts(ledger).fates for ledger in ledgers]
    old = {item for item in state.network | state.headers if all(item.identity in fates for fates in known)}
    if not old:
        return state
    return state._replace(
        network=state.network - old, headers=state.headers - old, lost_payloads=state.lost_payloads - old
    )


def explore(config: Config) -> int:
    """Visit every state; return their number. Raise Violation with the shortest way to the fault.

    A clean end must stay reachable from every state.
    """
    start = config.start()
    parents: dict[State, tuple[State, str] | None] = {start: None}
    sources, queue = defaultdict(list), deque([start])
    while queue:
        state = queue.popleft()
        try:
            check(state, config)
            for label, after in transitions(state, config):
                after = forget_decided(after)
                sources[after].append(state)
                if after not in parents:
                    parents[after] = (state, label)
                    queue.append(after)
        except Violation as violation:
            raise Violation(f"{violation}\n" + "\n".join(path(parents, state))) from None
    can_end, queue = set(), deque(state for state in parents if has_ended(state, config))
    while queue:
        state = queue.popleft()
        if state not in can_end:
            can_end.add(state)
            queue.extend(sources[state])
    if stuck := next((state for state in parents if state not in can_end), None):
        raise Violation("no clean end can be reached\n" + "\n".join(path(parents, stuck)))
    return len(parents)


def path(parents: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    labels = []
    while parent := parents[state]:
        state, label = parent
        labels.append(label)
    return labels[::-1]


def walk(config: Config, seed: int, steps: int) -> State:
    """Take random steps, then end without further faults; return the last state."""
    source, state = random.Random(seed), config.start()
    for step in range(steps + 400 * config.rows):
        if step == steps:
            state = state._replace(faults=Faults(second_coordinator=state.faults.second_coordinator))
        if has_ended(state, config):
            return state
        options = list(transitions(state, config))
        weights = [weight_of(label, step < steps) for label, _ in options]
        _, state = source.choices(options, weights)[0]
        state = forget_decided(state)
        check(state, config)
    raise Violation("no clean end without further faults")


def weight_of(label: str, has_faults: bool) -> float:
    """Make faults rare and rounds slow, so that long runs get far."""
    if "C1 starts" in label:
        return 0.4 if has_faults else 0
    if any(word in label for word in ("dies", "fences", "NaN", "lost", "cannot be read")):
        return 0.4
    return 3 if "chooses" in label else 10
