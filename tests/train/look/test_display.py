"""The live view of a run without a swarm."""

import io
from dataclasses import replace

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.train.look.test_widgets import drawn
from tpuswarm.train.look.describe import ParameterRow, parameter_table
from tpuswarm.train.look.display import LiveDisplay, RunHeader, SmoothedLoss, ViewState, draw_run

PICTURE = ViewState(
    "gpt2-tiny on 8 x cpu", "runs/demo", 840, 2_000, 768, "tokens", 27.4, 2.71731, 2.7502, 2.6204, 800,
    {"accuracy": 0.8125, "eval_accuracy": 0.79}, (3.0, 2.0),
)  # fmt: skip


def lines_of(width=80, elapsed=31.0, height=16, **changes):
    return drawn(draw_run(replace(PICTURE, **changes), elapsed, width, height), width)


@pytest.mark.parametrize("width", [80, 120])
def test_everything_is_shown(width):
    text = "\n".join(lines_of(width))
    for words in (
        "gpt2-tiny on 8 x cpu: runs/demo", " 42%", "840 of 2,000 steps", "0:00:31 elapsed", "0:00:42 left",
        "27.4 steps/s", "21,043 tokens/s", "loss 2.717 ", "smoothed 2.750 ", "held-out loss 2.620 at step 800",
        "accuracy 0.8125", "held-out accuracy 0.7900", "█▁",
    ):  # fmt: skip
        assert words in text
    assert all(len(line) <= width for line in text.splitlines())
    name = "a-run-with-a-name-that-is-longer-than-any-terminal-" * 4
    assert name in "".join(lines_of(width, run=name))
    assert "21,043 rows/s" in "\n".join(lines_of(width, unit="rows"))
    ended = "\n".join(lines_of(width, steps_per_s=None, ended=True))
    assert "0:00:31 elapsed" in ended and not any(words in ended for words in (" left", "steps/s", "tokens/s"))


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=200))
def test_smoothed_loss_is_the_bias_corrected_exponential_mean(losses):
    state = optax.ema(0.98).init(0.0)
    for loss in losses:
        expected, state = optax.ema(0.98).update(loss, state)
    assert SmoothedLoss(losses).value == pytest.approx(float(expected), rel=1e-3, abs=1e-3)


def draw_rows(*rows, picture=None, steps=2, **colours):
    """Return what a live view writes for the rows of a run."""
    console = Console(width=80, height=24, force_terminal=True, file=io.StringIO(), **colours)
    live = LiveDisplay(console)
    live.open(RunHeader("a", "cpu", "runs/a", 0, steps, 1, "rows", ()))
    if picture is not None:
        live.picture(picture)
    for row in rows:
        live.row(row)
    live.close()
    return console.file.getvalue()


def test_metrics_of_steps_and_evaluations_appear_in_the_view():
    written = draw_rows(
        {"step": 1, "loss": 1.0, "grad_norm": 3.0, "lr": 0.1, "accuracy": 0.25},
        {"step": 1, "eval_loss": 1.5, "eval_rows": 8, "eval_accuracy": 0.5},
        {"step": 2, "loss": 0.5, "grad_norm": 3.0, "lr": 0.1, "accuracy": 0.75},
    )
    last = written.rpartition("elapsed")[2]
    assert "accuracy 0.7500" in last and "held-out accuracy 0.5000" in last
    assert "grad_norm" not in last and "rows 8" not in last


@pytest.mark.parametrize("colours", [True, False])
def test_pictures_need_colours(colours):
    picture = np.full((8, 8, 3), 200, np.uint8)
    written = draw_rows({"step": 1, "loss": 1.0}, picture=picture, color_system="256", no_color=not colours)
    assert ("▀" in written) == colours


def test_view_that_stays_on_the_screen_says_nothing_of_the_time_left():
    _, elapsed, rest = draw_rows({"step": 1, "loss": 1.0}, steps=9).rpartition(" elapsed")
    assert elapsed and " left" not in rest


def test_nothing_jumps_from_frame_to_frame():
    frames = [
        lines_of(elapsed=elapsed, step=step, steps_per_s=speed, loss=loss)
        for step, speed, loss, elapsed in ((1, None, 11.5, 2), (99, 0.5, 0.01234, 60), (1_999, 1_234.5, 2.0, 3_599))
    ]
    for words in (" of 2,000 steps", " elapsed", " left", " tokens/s", "held-out loss"):
        places = {(row, line.index(words)) for lines in frames for row, line in enumerate(lines) if words in line}
        assert len(places) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_no_parameter_is_cut_and_only_facts_that_differ_have_a_column(width):
    def parameter(number, dtype="float32", sharding="replicated", frozen=False, tied="", statistic=False):
        path, shape = f"blocks/attention/{number}/w", (48, 1600, 6400)
        return ParameterRow(path, shape, dtype, sharding, frozen, True, tied, statistic, 2**31)

    rows = [parameter(number, sharding="axis 1 / 8" if number % 2 else "replicated") for number in range(40)]
    lines = drawn(parameter_table([*rows, parameter("tied", tied="head")], width), width)
    assert all(any(line.startswith(f"{row.path} ") for line in lines) for row in rows) and "…" not in "".join(lines)
    assert "axis 1 / 8" in "".join(lines) and "frozen" not in lines[0] and lines[-1].strip() == "all float32"
    assert "statistic" in drawn(parameter_table([rows[0], parameter(2, statistic=True)], 120), 120)[0]
    head = drawn(parameter_table([rows[0], parameter(2, dtype="bfloat16", frozen=True)], 120), 120)[0]
    assert head.split() == ["parameter", "shape", "dtype", "frozen", "decayed", "KiB/device"]


def test_upper_part_of_a_picture_fills_the_free_rows():
    made = np.zeros((256, 256, 3), np.uint8)
    made[:32, :128] = (255, 0, 0)

    def blocks(**changes):
        return [line.rstrip() for line in lines_of(metrics={}, **changes) if line.startswith("▀")]

    assert [len(line) for line in blocks(generated=made)] == [80] * 10
    console = Console(width=80, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(draw_run(replace(PICTURE, generated=made), 31.0, 80, 16))
    assert "38;2;255;0;0" in console.file.getvalue()
    assert blocks(generated=made, height=6) == []
    assert [len(line) for line in blocks(generated=made[:8, :8])] == [8] * 4
