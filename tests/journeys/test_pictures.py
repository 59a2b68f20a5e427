"""A StyleGAN2 from its data to a grid of pictures, as a user types it."""

import json

import pytest
from matplotlib.image import imread
from PIL import Image

TINY = "--resolution 8 --latent 4 --mapping 1 --channels 4 --most-channels 4 --group 2 --batch 8"


@pytest.fixture
def call(monkeypatch, typed, tmp_path):
    """Run a command in this process, in an empty directory; (code, out, err)."""
    monkeypatch.chdir(tmp_path)
    return lambda line: typed(*line.split())


def test_digits_are_trained_on_measured_and_drawn(call, tmp_path):
    run, out = tmp_path / "digits", tmp_path / "grid.png"
    code, _, err = call(f"train stylegan2-32 --data digits {TINY} --steps 3 --devices 1 --run {run}")
    assert code == 0, err
    code, printed, err = call(f"evaluate {run} --json")
    assert code == 0, err
    measured = json.loads(printed)
    assert measured["rows"] == 179 and {"loss", "d_loss", "g_loss"} <= measured.keys()
    code, printed, err = call(f"sample {run} --grid 2x3 --truncation 0.7 --out {out}")
    assert (code, printed) == (0, f"{run} at step 3: 6 pictures in {out}\n"), err
    assert imread(out).shape[:2] == (16, 24)
    code, printed, err = call(f"sample {run} --interpolate 4 --out {tmp_path / 'walk.gif'}")
    assert (code, printed) == (0, f"{run} at step 3: a film of 4 frames in {tmp_path / 'walk.gif'}\n"), err
    with Image.open(tmp_path / "walk.gif") as film:
        assert (film.n_frames, film.size) == (4, (8, 8))
    code, _, err = call(f"sample {run}")
    assert code == 2 and "makes pictures, not text: add --grid 8x8" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grid 8", "grid is ROWSxCOLUMNS, each from 1 to 99, such as 8x8, not '8'"),
        ("--grid 0x8", "not '0x8'"),
        ("--grid 2x2 --truncation 2", "truncation must be at least 0 and at most 1, not 2.0"),
        ("--grid 2x2 --out grid.txt", "--out grid.txt ends in none of .png, .jpg, .webp"),
        ("--interpolate 1", "interpolate must be at least 2, not 1"),
        ("--interpolate 9 --out walk.jpg", "--out walk.jpg ends in none of .gif, .png, .webp"),
        ("--grid 2x2 --out nowhere/grid.png", "there is no folder nowhere for --out nowhere/grid.png"),
    ],
)
def test_a_wrong_grid_is_said_before_a_model_is_read(call, words, said):
    code, _, err = call(f"sample runs/a {words}")
    assert code == 2 and said in " ".join(err.split())
