"""The protocol of docs/protocol.md is sound, and each sentence of it is needed."""

import pytest

from tests.swarm.protocol.search import explore, walk
from tests.swarm.protocol.state import Config, Faults, Violation, facts

SOUND = {
    "no faults": Config(),
    "no overlap": Config(has_overlap=False),
    "no staleness": Config(max_staleness=0, kept_versions=1),
    "a member dies": Config(rows=2, faults=Faults(member_crash=1)),
    "the coordinator dies": Config(rows=2, faults=Faults(coordinator_crash=1)),
    "the coordinator dies twice, cycles of two rows": Config(
        members=1, rows=4, cycle=2, faults=Faults(coordinator_crash=2)
    ),
    "a member is thought dead": Config(rows=2, faults=Faults(expired_lease=1)),
    "a payload is lost": Config(rows=2, faults=Faults(lost_payload=1)),
    "NaN": Config(rows=2, faults=Faults(poisoned_row=1)),
    "a reply is lost and the member dies": Config(members=1, rows=2, faults=Faults(lost_reply=1, member_crash=1)),
    "two coordinators": Config(members=1, rows=2, faults=Faults(second_coordinator=1, switched_coordinator=1)),
}


@pytest.mark.parametrize("config", SOUND.values(), ids=SOUND)
def test_every_state_of_a_small_swarm_is_sound_and_can_end(config):
    assert explore(config) > 50


BROKEN = {
    "only the ledger returns": Config(members=1, faults=Faults(coordinator_crash=1)),
    "list stored headers": Config(rows=2, faults=Faults(coordinator_crash=1, member_crash=1)),
    "the coordinator accepts": Config(rows=2, faults=Faults(coordinator_crash=1, expired_lease=1)),
    "check rows": Config(
        members=1, rows=2, faults=Faults(second_coordinator=1, switched_coordinator=1, coordinator_crash=1)
    ),
    "train again after dropped": Config(rows=5, max_staleness=0),
    "grant nothing while recovering": Config(rows=4, faults=Faults(coordinator_crash=1)),
    "short first contribution": Config(members=1, cycle=2, faults=Faults(member_crash=1)),
    "records without contributors": Config(members=1, rows=1, faults=Faults(poisoned_row=1)),
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_protocol_without_one_sentence_fails(sentence):
    config = BROKEN[sentence]
    with pytest.raises(Violation):
        explore(Config(**{**vars(config), "without": sentence}))


def test_versions_are_kept_for_the_stalest_contribution():
    with pytest.raises(Violation, match="are needed, but deleted"):
        explore(Config(rows=4, max_staleness=1, kept_versions=1))


@pytest.mark.parametrize("seed", range(12))
def test_long_run_with_many_faults_counts_every_row_once(seed):
    config = Config(
        members=3 + seed % 3,
        rows=20,
        cycle=1 + seed % 2,
        has_overlap=seed % 4 > 0,
        max_staleness=seed % 3,
        kept_versions=seed % 3 + 1,
        faults=Faults(*[3] * len(Faults._fields)),
    )
    known = facts(walk(config, seed, 400).ledger)
    assert len(known.counted) >= 20 and not known.counted & known.skipped
