"""The curves of a page and of a report show the same rows, whenever the page was opened."""

import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tpuswarm.swarm.views import report as swarm_report
from tpuswarm.train.look import report
from tpuswarm.train.run.directory import METRICS, append_event, append_rows
from tpuswarm.watch.page.history import MAX_POINTS, History

STEP_TOKENS = 64
SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)
OPENED = st.floats(0, 1)
"""Part of the run after which the page was opened."""
LAGS = st.sampled_from([0, 1, 2, 10**6])
"""Versions by which members fall behind; the last: nobody adopts one before the end."""


def lines_of(module: Any, draw: Callable[[], bytes]) -> list[np.ndarray]:
    """Return the points of each pale line, [n, 2], with those of losses that are not finite left out."""
    figures: list[Figure] = []
    to_png, module.to_png = module.to_png, lambda figure: figures.append(figure) or b""
    try:
        draw()
    finally:
        module.to_png = to_png
    lines = [line.get_xydata() for line in figures[0].axes[0].lines if line.get_alpha()]
    return [line[np.isfinite(line[:, 1])] for line in lines]


def watched(rows: list[dict[str, Any]], opened: float, swarm: bool, commits: Callable[[int], Any]) -> History:
    """Return the history of a page that was opened in the middle of a run; check what its browser holds.

    commits: writes the commits before a row.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        append_event(folder, "started")
        history, shown, cuts = None, {}, np.linspace(opened, 1, 5) * len(rows)
        for begin, end in pairwise([0, *map(int, cuts)]):
            for event in commits(end):
                append_event(folder, "commit", **event)
            append_rows(folder / METRICS, rows[begin:end])
            updates = history and history.read_new()
            if updates is None:  # the page opens, or has to be sent everything again
                history = History(folder, swarm)
                shown = {"losses": list(history.losses), "speeds": list(history.speeds)}
                continue
            for curve in shown:
                if tail := getattr(updates, curve):
                    shown[curve][tail.start :] = tail.points
        assert shown == {"losses": history.losses, "speeds": history.speeds}
        late = History(folder, swarm)
        assert [point[1:] for point in late.losses] == [point[1:] for point in history.losses]
        return history


def grouped(rows: np.ndarray) -> list[np.ndarray]:
    """Return the rows in the equal groups that a page averages."""
    size = 1
    while len(rows) > 2 * MAX_POINTS * size:
        size *= 2
    return [rows[at : at + size] for at in range(0, len(rows), size)]


@settings(max_examples=15)
@given(rng=SEEDS, steps=st.integers(1, 5 * MAX_POINTS), opened=OPENED)
def test_curve_of_a_plain_run(rng, steps, opened):
    noise = rng.normal(3, 1, steps)
    rows = [
        {"step": step + 1, "tokens": (step + 1) * STEP_TOKENS, "loss": None if noise[step] < 1 else noise[step],
         "tokens_per_s": 100.0, "wall_s": 1.0}
        for step in range(steps)
    ]  # fmt: skip
    history = watched(rows, opened, False, lambda _: ())
    [drawn] = lines_of(report, lambda: report.draw_loss_picture(rows, [], "tokens"))
    means = [(*group.mean(0), group[:, 1].min(), group[:, 1].max()) for group in grouped(drawn)]
    np.testing.assert_allclose(np.array(history.losses), np.array(means))


@settings(max_examples=15)
@given(
    rng=SEEDS, steps=st.integers(1, 500), members=st.integers(1, 4), cycle=st.integers(1, 20), lag=LAGS, opened=OPENED
)
def test_curve_of_a_swarm(rng, steps, members, cycle, lag, opened):
    rows = []
    for begin in range(0, steps, cycle):  # a member's rows come together
        for member in rng.permutation(members):
            rows += [
                {"step": step + 1, "tokens": (step + 1) * STEP_TOKENS, "member": f"m{member}", "loss": rng.normal(3, 1),
                 "version": max(0, begin // cycle - lag)}
                for step in range(begin, min(begin + cycle, steps))
            ]  # fmt: skip
    written = 0

    def commits(end: int):
        nonlocal written
        while written * cycle * members < end:
            written += 1
            yield {"version": written, "tokens": written * cycle * members * STEP_TOKENS, "contributors": [],
                   "others": []}  # fmt: skip

    history = watched(rows, opened, True, commits)
    drawn = lines_of(swarm_report, lambda: swarm_report.loss_picture(rows, "tokens"))
    pooled = sorted(loss for line in drawn for loss in line[:, 1])
    groups = grouped(np.array([(row["tokens"] * members, row["loss"]) for row in rows]))
    assert pooled == sorted(row["loss"] for row in rows)
    np.testing.assert_allclose([point.mean for point in history.losses], [group[:, 1].mean() for group in groups])
    near = 3 * cycle * members * STEP_TOKENS
    for point, group in zip(history.losses, groups, strict=True):
        assert abs(point.tokens - group[:, 0].mean()) <= near, "tokens that the report's members have together"
