"""Impossible values of options, and places that hold nothing useful: one sentence, and nothing is left."""

import re
from pathlib import Path

import pytest

HUGE = "9" * 40
NO_NUMBERS = ("nan", "inf", "-1", "text", "")
POSITIVE = (*NO_NUMBERS, "0")
COUNT = (*POSITIVE, "1.5")
TRAIN = "train gpt2-tiny --data fake --layers 1 --heads 1 --width 8 --context 4 --run new"
SWARM = f"{TRAIN} --members 2 --outer nesterov"
PLAN = "plan gpt2-tiny --on v5e-1"
WRONG = {
    TRAIN: {
        **dict.fromkeys(("steps", "tokens", "batch", "accumulate"), (*COUNT, "1e99", HUGE)),
        **dict.fromkeys(("save-every", "eval-every"), (*POSITIVE, "0m", "5x", "1e99", HUGE)),
        **dict.fromkeys(("clip", "lr"), POSITIVE),
        **dict.fromkeys(("ema", "dropout", "warmup", "beta2"), (*NO_NUMBERS, "1", "1e300")),
        **dict.fromkeys(("lr-end", "weight-decay"), NO_NUMBERS),
        **dict.fromkeys(("layers", "heads", "width", "context", "vocab", "keep", "hosts"), COUNT),
        "epochs": (*POSITIVE, "1e300"),
        "seed": (*NO_NUMBERS, "1.5", "4294967296", HUGE),
        "grace": (*NO_NUMBERS, "1e400", HUGE),
        "devices": (*POSITIVE, "[9]", "[]", "[0,0]", HUGE),
        "members": (*NO_NUMBERS, "1.5"),  # 0 is a head for members that join
        **dict.fromkeys(
            ("data", "run", "init-from", "freeze", "decay", "precision", "shard", "wandb", "hosts-at", "outer",
             "quantize", "overlap", "ray-address"), ("",),
        ),
    },
    SWARM: {**dict.fromkeys(("cycle", "devices-per-member"), COUNT), "outer-lr": POSITIVE},
    PLAN: {
        **dict.fromkeys(("batch", "accumulate", "tokens", "members"), COUNT),
        **dict.fromkeys(("precision", "shard", "freeze"), ("",)),
        "ema": (*POSITIVE, "1"),
    },
    "sample runs/a": {"tokens": COUNT, "temperature": NO_NUMBERS, "seed": (*NO_NUMBERS, "4294967296", HUGE)},
    "evaluate runs/a": {"data": ("",)},
    "catalog": {"max-chips": POSITIVE, "zone": ("",)},
    "ledger show runs/a": {"n": POSITIVE},
}  # fmt: skip
PLACES = ("folder", "missing", "binary", "loop", "/proc/self/mem")
READERS = (
    "train {}.py:recipe", "train {}/recipe.py:recipe", "train {}.toml", "train gpt2-tiny --steps 1 --data {}",
    "train gpt2-tiny --steps 1 --init-from {}", "train gpt2-tiny --steps 1 --init-from hf:{}",
    "train gpt2-tiny --data fake --steps 1 --run {}/run/run", "train gpt2-tiny --steps 1 --tokenizer hf:{}",
    "sample {}", "evaluate {}", "export {} out", "status {}", "logs {}", "stop {}", "profile {}", "ledger show {}",
    "ledger verify {}", "simulate {}", "join 127.0.0.1:1 --token-file {}", "plan {}.py:recipe --on v5e-1",
)  # fmt: skip


@pytest.fixture
def refused(monkeypatch, typed, tmp_path):
    """Run a command that is refused, in an empty folder; return its sentence."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        code, out, err = typed(*words)
        *before, sentence = err.splitlines()
        assert (code, out) == (2, "") and sentence.startswith("error: "), (words, code, out, err)
        assert not before or before == ["v5e-1: compiling"]  # a plan compiles in another process
        return sentence

    return run


@pytest.mark.parametrize(("command", "option"), [(command, option) for command in WRONG for option in WRONG[command]])
def test_impossible_value_is_refused_by_name(refused, command, option):
    flag = f"--{option}" if len(option) > 1 else f"-{option}"
    for value in WRONG[command][option]:
        sentence = refused(*command.split(), flag, value)
        assert flag in sentence or re.search(rf"\b{option.replace('-', '[-_]')}\b", sentence), (value, sentence)
        assert not list(Path().iterdir()), value


@pytest.mark.parametrize("command", ["train", "plan", "sample", "status", "logs", "stop", "ledger show", "evaluate"])
def test_empty_name_is_refused(refused, command):
    assert "is empty; give it a value" in refused(*command.split(), "")


@pytest.mark.parametrize("command", READERS)
def test_places_that_hold_nothing_useful(refused, monkeypatch, command):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its import has read the environment
    files = {f"{name}{end}" for name in ("folder", "binary", "loop") for end in ("", ".py", ".toml")}
    for end in ("", ".py", ".toml"):
        Path(f"folder{end}").mkdir()
        Path(f"binary{end}").write_bytes(bytes(range(256)) * 8)
        Path(f"loop{end}").symlink_to(f"loop{end}")
    for place in PLACES:
        if "--run" in command and place in ("folder", "missing"):
            continue  # a run can be there
        if command.startswith("plan") and place != "loop":
            continue  # each plan starts a process
        refused(*command.format(place).split())
        assert {path.name for path in Path().iterdir()} == files, place
