"""Expected training of machines that may be preempted."""

import numpy as np
import pytest

from tpuswarm.catalog import spot_records
from tpuswarm.plan.outlook import MachineGroup, Outlook, make_outlook, outlook_sentences, share_that_counts
from tpuswarm.plan.speed import Range

NOW = 1_900_000_000.0
SPEEDS = {"v2-8": Range(1_000.0, 2_000.0), "v3-8": Range(3_000.0, 4_000.0)}
CHECKPOINT_S = 300.0


def predict(*groups: MachineGroup, tokens: int | None = None, checkpoint_s: float = CHECKPOINT_S) -> Outlook:
    return make_outlook(groups, SPEEDS, checkpoint_s, tokens, NOW)


def test_share_that_counts_is_that_of_a_simulation():
    """A machine runs for exponential times, keeps whole intervals of each, and is away in between."""
    dice = np.random.default_rng(0)
    for interval in (0.1, 2.0):
        for record in spot_records():
            ran = dice.exponential(record.hours_between, 200_000)
            away = dice.exponential(record.hours_away, 200_000)
            simulated = (interval * np.floor(ran / interval)).sum() / (ran + away).sum()
            assert share_that_counts(record, interval) == pytest.approx(simulated, abs=0.005)


def test_only_spot_machines_are_preempted_and_all_speeds_add_up():
    found = predict(
        MachineGroup("v2-8", "us-central1-f", "spot", 10),
        MachineGroup("v3-8", "europe-west4-a", "on-demand", 2),
        tokens=10**9,
    )
    spot, stays = found.groups
    assert stays.share == Range(1.0, 1.0) and stays.tokens_per_s == Range(6_000.0, 8_000.0)
    assert 0.9 < spot.share.low < spot.share.high < 1
    assert 15_000 < found.tokens_per_s.low < 16_000 and 27_000 < found.tokens_per_s.high < 28_000
    assert found.hours.low == pytest.approx(1e9 / found.tokens_per_s.high / 3600)
    assert found.hours.high == pytest.approx(1e9 / found.tokens_per_s.low / 3600)


def test_machines_are_paid_until_they_end_or_training_is_done():
    permanent = MachineGroup("v3-8", "europe-west4-a", "on-demand", 1, dollars=8.0)
    temporary = MachineGroup("v3-8", "us-central1-a", "on-demand", 1, dollars=2.0, ends=NOW + 36_000)
    found = predict(permanent, temporary, tokens=3_000 * 36_000 * 3)
    assert found.hours == Range(pytest.approx(12.5), pytest.approx(20.0))  # ten hours of both, then of one
    assert found.dollars == Range(pytest.approx(12.5 * 8 + 20), pytest.approx(20 * 8 + 20))
    assert found.ends is None and found.until_then is None
    unpriced = predict(MachineGroup("v3-8", "us-central1-a", "on-demand", 1, dollars=None), tokens=10**6)
    assert unpriced.dollars is None and unpriced.document()["dollars"] == "unknown"
    assert "for unknown dollars" in outlook_sentences(unpriced, "tokens")[1]
    assert predict(permanent).document()["dollars"] is None, "no number of tokens was given"


def test_grant_that_ends_shows_how_far_it_reaches():
    week = MachineGroup("v3-8", "us-central1-a", "on-demand", 1, ends=NOW + 7 * 86_400)
    found = predict(week, tokens=10**12)
    assert found.hours is None and found.ends == week.ends
    assert found.until_then == Range(pytest.approx(3_000 * 7 * 86_400), pytest.approx(4_000 * 7 * 86_400))
    until = "1.8B to 2.4B tokens until the last grant ends on 2030-03-24"
    assert outlook_sentences(found, "tokens")[-1] == f"{until}: perhaps fewer than the 1,000,000,000,000 requested"
    assert (
        "3.5 to 4.6 h, free of charge; traffic comes on top"
        in outlook_sentences(predict(week, tokens=50_000_000), "tokens")[1]
    )
    over = predict(MachineGroup("v3-8", "us-central1-a", "spot", 1, ends=NOW - 1), tokens=10**6)
    assert over.hours is None and over.until_then == Range(0.0, 0.0)


def test_machines_of_unknown_speed_are_named_and_left_out():
    unknown, known = (MachineGroup(type, "us-central2-b", "spot", 3) for type in ("v4-8", "v2-8"))
    found = predict(unknown, known, tokens=10**6)
    assert found.left_out == ("v4-8",) and [group.group.type for group in found.groups] == ["v2-8"]
    assert "v4-8" in outlook_sentences(found, "tokens")[0]
    nothing = predict(unknown, tokens=10**6)
    assert nothing.groups == () and nothing.hours is None and nothing.ends is None
