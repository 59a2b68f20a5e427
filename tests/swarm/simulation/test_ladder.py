"""The ladder's figures: what it fits, what it predicts and which runs are left; it trains nothing here."""

import json

import numpy as np
import pytest
from benchmarks import ladder


def gaps(exponent: float, noise: float = 0.0) -> list[tuple[int, float, float]]:
    """2 and 4 members on three sizes, three seeds: 1% and 2% at 124 M."""
    random = np.random.default_rng(0)
    return [
        (members, size, members / 200 * (size / 124e6) ** exponent * np.exp(noise * random.standard_normal()))
        for members in (2, 4)
        for size in (1e5, 3e5, 1e6)
        for _ in range(3)
    ]


def test_a_power_law_is_found_and_carried_to_124_million_parameters():
    exponent, at = ladder.fit(gaps(-0.3))
    assert exponent.startswith("-0.30 (-0.30")
    assert {members: pytest.approx(middle) for members, (_, middle, _) in at.items()} == {2: 0.01, 4: 0.02}
    _, loose = ladder.fit(gaps(-0.3, noise=0.1))
    for members, truth in {2: 0.01, 4: 0.02}.items():
        low, middle, high = loose[members]
        assert low < truth < high and low < middle < high < 10 * low


def test_the_published_gap_at_124_million_lies_on_the_line_between_theirs():
    assert ladder.charles(4) == pytest.approx(0.0127, abs=5e-5)
    assert 0.0015 < ladder.charles(2) < 0.007 and 0.017 < ladder.charles(8) < 0.039


def test_it_goes_on_where_it_stopped_and_tables_say_what_is_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "DONE", tmp_path / "ladder.jsonl")
    monkeypatch.setattr(ladder, "train", lambda task, data: 2.0 + 0.1 * (task.name != "single") + task.seed / 100)
    text = tmp_path / "text"
    text.write_text("text")
    settings = ladder.Settings(False, text)
    every = ladder.tasks(ladder.RUNGS)
    assert len({task.key for task in every}) == len(every)
    ladder.write(every[0], 1.5, 3.0)
    list(ladder.run(settings))
    lines = [json.loads(line) for line in ladder.DONE.read_text().splitlines()]
    assert len(lines) == len(every) and lines[0]["loss"] == 1.5
    (whole, gap, *_, optimizers) = ladder.run(ladder.Settings(False, text, hours=0.0))
    assert len(ladder.DONE.read_text().splitlines()) == len(every)
    assert len(whole.rows) == len(gap.rows) == len(ladder.RUNGS) * len(ladder.MEMBERS)
    assert "+0.1000 ± 0.0000 (+5.0%)" in gap.rows[-1] and "not run" not in optimizers.markdown()
    ladder.DONE.write_text("\n".join(json.dumps(line) for line in lines if line["arm"] != "8 × 30, 0.8"))
    _, gap, *_ = ladder.run(ladder.Settings(False, text, hours=0.0))
    assert "not run" in gap.rows[-1]
    kept = [line for line in lines if (line["rung"], line["arm"]) != ("1 M", f"8 × 30, {ladder.NOW}")]
    ladder.DONE.write_text("\n".join(map(json.dumps, kept)))
    whole, *_ = ladder.run(ladder.Settings(False, text, hours=0.0))
    assert whole.rows[-1][:2] == ("1 M", "4 × 30")
