"""Options with values that they cannot have, places that hold nothing of use: one sentence, and nothing is left."""

import re
from pathlib import Path

import pytest

HUGE = "9" * 40
NO_NUMBERS = ("nan", "inf", "-1", "text", "")
SMALL = "train gpt2-tiny --data fake --layers 1 --heads 1 --width 8 --context 4"
WRONG = {
    **dict.fromkeys(("steps", "tokens", "batch", "accumulate"), (*NO_NUMBERS, "0", "1.5", "1e99", HUGE)),
    **dict.fromkeys(("save-every", "eval-every"), (*NO_NUMBERS, "0", "0m", "5x", "1e99", HUGE)),
    **dict.fromkeys(("clip", "epochs", "lr"), (*NO_NUMBERS, "0")),
    "epochs": (*NO_NUMBERS, "0", "1e300"),
    **dict.fromkeys(("ema", "dropout", "warmup", "beta2"), (*NO_NUMBERS, "1", "1e300")),
    **dict.fromkeys(("lr-end", "weight-decay"), NO_NUMBERS),
    **dict.fromkeys(("layers", "heads", "width", "context", "vocab", "keep"), (*NO_NUMBERS, "0", "1.5")),
    "seed": (*NO_NUMBERS, "1.5", "4294967296", HUGE),
    "grace": (*NO_NUMBERS, "1e400", HUGE),
    "devices": (*NO_NUMBERS, "0", "[9]", "[]", "[0,0]", HUGE),
    "members": (*NO_NUMBERS, "1.5"),  # none is a head for members that join
    **dict.fromkeys(("cycle", "devices-per-member"), (*NO_NUMBERS, "0", "1.5")),
    "outer-lr": (*NO_NUMBERS, "0"),
    "hosts": (*NO_NUMBERS, "0", "1.5"),
}


@pytest.fixture
def refused(monkeypatch, typed, tmp_path):
    """Type a command that is refused, in an empty directory; the sentence."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        code, out, err = typed(*words)
        *before, sentence = err.splitlines()
        assert (code, out) == (2, "") and sentence.startswith("error: "), (words, code, out, err)
        assert not before or before == ["v5e-1: compiling"]  # as a plan does in another process
        return sentence

    return run


def names(sentence: str, option: str) -> bool:
    return re.search(rf"\b{option.replace('-', '[-_]')}\b", sentence) is not None


@pytest.mark.parametrize("option", WRONG)
def test_training(refused, option):
    swarm = ["--members", "2", "--outer", "nesterov"] if option in ("cycle", "devices-per-member", "outer-lr") else []
    for value in WRONG[option]:
        sentence = refused(*SMALL.split(), *swarm, f"--{option}", value, "--run", "new")
        assert names(sentence, option), (value, sentence)
        assert not list(Path().iterdir()), value


TEXTS = (
    "data", "run", "init-from", "freeze", "decay", "precision", "shard", "devices", "wandb", "hosts-at", "outer",
    "quantize", "overlap", "ray-address",
)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (SMALL, TEXTS),
        ("evaluate runs/a", ("data",)),
        ("plan gpt2-tiny", ("batch", "precision", "shard", "accumulate", "freeze", "tokens")),
        ("catalog", ("zone",)),
    ],
)
def test_an_empty_word_is_no_value(refused, command, options):
    for option in options:
        assert names(refused(*command.split(), f"--{option}", ""), option), option


@pytest.mark.parametrize("command", ["train", "plan", "sample", "status", "logs", "stop", "ledger show", "evaluate"])
def test_an_empty_name(refused, command):
    assert "is given as an empty word" in refused(*command.split(), "")


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        ("sample runs/a", "tokens", (*NO_NUMBERS, "0", "1.5")),
        ("sample runs/a", "temperature", NO_NUMBERS),
        ("sample runs/a", "seed", (*NO_NUMBERS, "4294967296", HUGE)),
        ("plan gpt2-tiny --on v5e-1", "batch", (*NO_NUMBERS, "0", "1.5")),
        ("plan gpt2-tiny --on v5e-1", "accumulate", (*NO_NUMBERS, "0", "1.5")),
        ("plan gpt2-tiny --on v5e-1", "tokens", (*NO_NUMBERS, "0", "1.5")),
        ("plan gpt2-tiny --on v5e-1", "members", (*NO_NUMBERS, "0", "1.5")),
        ("plan gpt2-tiny --on v5e-1", "ema", (*NO_NUMBERS, "0", "1")),
        ("catalog", "max-chips", (*NO_NUMBERS, "0")),
        ("ledger show runs/a", "-n", (*NO_NUMBERS, "0")),
    ],
)
def test_numbers_of_other_commands(refused, command, option, values):
    flag = option if option.startswith("-") else f"--{option}"
    for value in values:
        sentence = refused(*command.split(), flag, value)
        assert flag in sentence or names(sentence, option), (value, sentence)


PLACES = ("folder", "missing", "binary", "loop", "/proc/self/mem")
READERS = (
    "train {}.py:recipe", "train {}/recipe.py:recipe", "train {}.toml", "train gpt2-tiny --steps 1 --data {}",
    "train gpt2-tiny --steps 1 --init-from {}", "train gpt2-tiny --steps 1 --init-from hf:{}",
    "train gpt2-tiny --data fake --steps 1 --run {}/run/run", "train gpt2-tiny --steps 1 --tokenizer hf:{}",
    "sample {}", "evaluate {}", "export {} out", "status {}", "logs {}", "stop {}", "profile {}", "ledger show {}",
    "ledger verify {}", "simulate {}", "join 127.0.0.1:1 --token-file {}", "plan {}.py:recipe --on v5e-1",
)  # fmt: skip


@pytest.mark.parametrize("command", READERS)
def test_places_that_hold_nothing_of_use(refused, monkeypatch, command):
    """Each as it is written, and with the end of a name that the command asks for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the environment was read at its import
    ends = ("", ".py", ".toml")
    for end in ends:
        Path(f"folder{end}").mkdir()
        Path(f"binary{end}").write_bytes(bytes(range(256)) * 8)
        Path(f"loop{end}").symlink_to(f"loop{end}")
    for place in PLACES:
        if "--run" in command and place in ("folder", "missing"):
            continue  # a run can be there
        refused(*command.format(place).split())
        there = {path.name for path in Path().iterdir()}
        assert there == {f"{name}{end}" for name in ("folder", "binary", "loop") for end in ends}, place
