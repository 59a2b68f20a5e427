"""`tpuswarm train FILE`: its table [train], and options on the command line."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.cli import my_recipe
from tpuswarm.cli.train.next_command import print_next
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2

FILE = """\
[train]
recipe = "my_recipe.py:line"
steps = 4
batch = 8
precision = "f32"
save_every = "1m"
run = "runs/a"

[train.options]
width = 5
lr = 0.01
"""


@pytest.fixture
def train(typed, tmp_path, monkeypatch):
    """Train with a file of this text and more words on the command line; (code, err, config.toml)."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(my_recipe.__file__, "my_recipe.py")

    def run(text: str, line: str = "") -> tuple[int, str, dict]:
        Path("run.toml").write_text(text)
        code, _, err = typed("train", "run.toml", *line.split())
        config = Path("runs/a/config.toml")
        return code, err, tomllib.loads(config.read_text()) if config.exists() else {}

    return run


def test_command_line_overrides_the_file(train):
    code, _, config = train(FILE, "--tokens 24 --lr 0.02 --seed 7")
    assert code == 0
    assert config["recipe"]["options"] == {"width": 5, "lr": 0.02}
    assert config["train"]["steps"] == 3 and config["train"]["batch"] == 8 and config["train"]["seed"] == 7
    assert config["may_change"]["save_every"] == "1m" and config["may_change"]["keep"] == 3


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("steps = 4", "stesp = 4", "run.toml, line 3: train has no key stesp; did you mean steps?"),
        ("steps = 4", 'steps = "many"', "run.toml, line 3: train.steps: steps is a number such as"),
        ("steps = 4", "steps = 4\ntokens = 100", "run.toml, line 1: train: give one of steps, tokens and epochs"),
        ("batch = 8", "batch = [8]", "run.toml, line 4: train.batch: "),
        ('"f32"', '"fp61"', "run.toml, line 5: train.precision: precision is bf16, f32 or highest, not 'fp61'"),
        ('"1m"', '"often"', "run.toml, line 6: train.save_every: save_every is steps such as"),
        ('"runs/a"', '"s3://bucket/a"', "run.toml, line 7: train.run: "),
        ("width = 5", "widht = 5", "run.toml, line 10: train.options.widht: my_recipe.py:line has no option widht"),
        ("width = 5", 'width = "wide"', "run.toml, line 10: train.options.width: width must be a whole number"),
        ("[train]", "[train]\nmembers = -1", "run.toml, line 2: train.members: members must be at least 0"),
        ("[train]", "[trian]", "run.toml, line 1: the file has no key trian; did you mean train?"),
        ('recipe = "my_recipe.py:line"\n', "", "run.toml, line 1: train needs recipe"),
        ("my_recipe.py:line", "gpt2-tny", "unknown recipe 'gpt2-tny'; did you mean gpt2-tiny?"),
        ("steps = 4", "steps = = 4", "run.toml is not valid TOML: "),
    ],
)
def test_fault_in_a_file_is_reported_with_its_line(train, before, after, sentence):
    assert FILE.count(before) == 1
    code, err, config = train(FILE.replace(before, after))
    assert (code, config) == (2, {}) and err.startswith(f"error: {sentence}"), err


@pytest.mark.parametrize(
    "words", [("train", "--run", "runs/a"), ("resume", "runs/a"), ("resume", "a"), ("resume", "last")]
)
def test_run_resumes_without_naming_its_recipe_again(train, typed, words):
    assert train(FILE)[0] == 0
    code, out, err = typed(*words)
    assert code == 0 and "runs/a finished at step 4 of 4" in out, err


def test_resuming_a_run_that_is_not_there_names_it(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = typed("resume", "runs/nope")
    assert code == 2 and "runs/nope" in err and "machine" not in err, err
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, _, err = typed("resume", "nope")
    assert code == 2 and "there is no run and no machine nope" in err and "made no fleet" in err, err


def test_recipe_file_is_executed_once_unless_it_changes(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"{Path(my_recipe.__file__).read_text()}\nprint('executed')\n"
    Path("mine.py").write_text(text)
    for found in (text, f"{text}\n"):
        Path("mine.py").write_text(found)
        code, out, err = typed("train", "mine.py:line", "--steps", "2", "--batch", "8")
        assert code == 0 and out.count("executed") == 1, err


def test_file_that_trains_when_it_is_imported_is_refused(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = "\nfrom tpuswarm import Trainer\nTrainer().fit(line(), steps=2, run='own')\n"
    Path("mine.py").write_text(Path(my_recipe.__file__).read_text() + train)
    code, _, err = typed("train", "mine.py:line", "--steps", "2")
    assert code == 2 and "mine.py trains when it is imported: run `python mine.py`, or put" in err
    assert not Path("own").exists()


def test_finished_run_prints_a_sample_of_its_text_and_the_next_command(typed, tmp_path, monkeypatch, text_file):
    monkeypatch.chdir(tmp_path)
    words = ["--layers", "1", "--width", "16", "--heads", "1", "--context", "8", "--steps", "2", "--run", "own"]
    code, out, err = typed("train", "gpt2-tiny", "--data", str(text_file), *words)
    assert code == 0, err
    length = len(text_file.read_text())
    assert "\nmodel: 1 layer, width 16, context 8, " in err
    assert f"\ndata: {length - length // 10:,} characters to train on, {length // 10:,} held out\n" in err
    assert "\nsettings: 16 rows a step, learning rate 0.001 after a warm-up of 5%, then a cosine to 0.0001, f32" in err
    _, after = out.split("a sample of its text:\n")
    assert re.fullmatch(r"(  .*\n){1,10}next: `tpuswarm sample own`\n", after)


def test_text_of_a_hook_is_no_sample_of_the_model(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    talks = """
from tpuswarm import Every

def talks():
    recipe = line()
    recipe.hooks = lambda: [Every(1, lambda step: "words")]
    return recipe
"""
    Path("mine.py").write_text(Path(my_recipe.__file__).read_text() + talks)
    code, out, err = typed("train", "mine.py:talks", "--steps", "2", "--batch", "8", "--run", "own")
    assert code == 0 and "step 2: words" in f"{out}{err}" and "finished at step 2" in out, err
    assert "sample" not in out and out.endswith("next: `tpuswarm page own`\n")


def test_pictures_are_the_next_to_see_of_a_model_that_makes_them(tmp_path, capsys):
    print_next(tmp_path, StyleGAN2(resolution=8))
    assert capsys.readouterr().out == f"next: `tpuswarm sample {tmp_path} --grid 4x4 --out grid.png`\n"
