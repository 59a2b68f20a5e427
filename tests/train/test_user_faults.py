"""Errors of every kind at every call of a user's recipe, source, hook and logger: a sentence with the user's line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuswarm
from tpuswarm import Every, InputError, Trainer
from tpuswarm.train.run import checkpoint
from tpuswarm.train.run.directory import EVENTS, METRICS, read_config, read_rows
from tpuswarm.train.user_code import blame

STEPS = 6
armed = {}
"""The error to raise at each place, and at which of its calls."""


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("__str__ fails")


class TwoArguments(Exception):
    """Cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__("a message")


class NoException(BaseException):
    """Neither an Exception nor one of Python's own that end programs."""


class OwnInputError(InputError):
    def __init__(self, one, two):
        super().__init__("a sentence")


def endless():
    return endless()


ERRORS = {
    "message": lambda: ValueError("a message"), "no message": ValueError, "mute": Mute,
    "two arguments": lambda: TwoArguments(1, 2), "group": lambda: ExceptionGroup("several", [ValueError("a message")]),
    "exit": SystemExit, "generator exit": GeneratorExit, "stop": StopIteration, "base": NoException,
    "memory": MemoryError, "recursion": endless, "subclass": lambda: OwnInputError(1, 2),
    "lost file": lambda: FileNotFoundError(2, "No such file or directory", "table.csv"), "assertion": AssertionError,
    "missing key": lambda: KeyError("key"),
}  # fmt: skip


def reach(place):
    error, calls_left = armed.get(place, (None, 0))
    if error is not None:
        armed[place] = error, calls_left - 1
        if calls_left <= 1:
            raise error()


class Line(tpuswarm.Program):
    def init(self, key, shared=None):
        reach("init")
        return {"w": jnp.ones(3) if shared is None else shared}

    def weights(self):
        reach("weights")

    def step(self, state, batch, clock):
        reach("step")
        loss = jnp.square(batch["x"] @ state["w"]).mean()
        return {"w": 0.9 * state["w"]}, {"loss": loss}

    def evaluate(self, state, batch):
        reach("evaluate")
        return {"loss": jnp.square(batch["x"] @ state["w"]).mean()}

    def batch_spec(self, size):
        reach("batch_spec")
        return {"x": jax.ShapeDtypeStruct((size, 3), np.float32)}

    def exchange(self):
        reach("exchange")
        return tpuswarm.Exchange(self._get, lambda state, shared: {"w": shared})

    def _get(self, state):
        reach("get")
        return state["w"]

    def parameters(self, state):
        reach("parameters")
        return [tpuswarm.Parameter("w", frozen=False, decayed=False, tied="")]


class Source:
    def __init__(self, split):
        self._split = split
        self._x = np.random.default_rng(len(split)).normal(size=(16, 3)).astype(np.float32)

    @property
    def rows_per_epoch(self):
        reach("rows_per_epoch")
        return 16

    @property
    def digest(self):
        reach("digest")
        return "d"

    @property
    def in_memory(self):
        reach("in_memory")
        return False

    def seeded(self, seed):
        reach("seeded")
        return self

    def rows(self, start, count):
        reach(f"{self._split} rows")
        return {"x": self._x[np.arange(start, start + count) % 16]}

    def position(self, row):
        reach("position")
        return {"row": row}

    def go_to(self, position):
        reach("go_to")


class Logger:
    def write(self, row):
        reach("write")

    def close(self):
        reach("close")


class Recipe(tpuswarm.Recipe):
    name = "line"

    def program(self, options):
        reach("program")
        return Line()

    def data(self, split):
        reach(f"{split} data")
        return Source(split)

    def options(self):
        reach("options")
        return {}

    def keep(self, folder):
        reach("keep")

    def hooks(self):
        reach("hooks")
        return [Every(2, lambda step: reach("hook")), Every("evaluation", lambda step: reach("evaluation hook"))]

    def loggers(self):
        reach("loggers")
        return [Logger()]

    def pictured(self, state):
        reach("pictured")

    def sample(self, state, prompt, *, tokens, temperature, seed):
        reach("sample")
        return "text"


ENDING = [
    ("program", 1), ("train data", 1), ("validation data", 1), ("options", 1), ("keep", 1), ("hooks", 1), ("init", 1),
    ("weights", 1), ("step", 1), ("step", 2), ("evaluate", 1), ("evaluate", 2), ("batch_spec", 1), ("exchange", 1),
    ("exchange", 6), ("get", 2), ("parameters", 1), ("rows_per_epoch", 1), ("digest", 1), ("in_memory", 1),
    ("seeded", 1), ("train rows", 1), ("train rows", 4), ("validation rows", 1), ("validation rows", 3),
    ("position", 1), ("position", 2),
]  # fmt: skip
"""Places without which a run cannot go on, and at which of their calls they fail."""
NOTED = ["hook", "evaluation hook", "loggers", "write", "close", "pictured", "sample"]
"""Places without which a run goes on."""


def by_rotation(places):
    """Give each place another kind of error."""
    kinds = list(ERRORS)
    return [(place, kinds[number % len(kinds)]) for number, place in enumerate(places)]


@pytest.fixture(autouse=True)
def disarmed():
    yield
    armed.clear()


def fit(folder):
    trainer = Trainer(devices=1, save_every=2, eval_every=2)
    result = trainer.fit(Recipe(), steps=STEPS, batch=4, run=folder)
    return result.ended, np.asarray(result.state["w"]).tolist(), numbers(folder)


def numbers(folder):
    """Return the columns of the rows of a run that do not depend on the time."""
    return [
        {key: row[key] for key in ("step", "loss", "eval_loss") if key in row} for row in read_rows(folder / METRICS)
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.mark.parametrize("kind", ERRORS)
def test_sentence_names_the_line_of_an_error(kind):
    with pytest.raises(InputError) as caught, blame("it fails"):
        raise_through_generator = (armed.update(here=(ERRORS[kind], 1)) or reach("here") for _ in range(1))
        list(raise_through_generator)
    sentence = str(caught.value)
    if kind != "subclass":  # is a sentence
        assert sentence.startswith("it fails: ") and f"({__file__}:" in sentence and "\n" not in sentence


def test_ctrl_c_is_no_failure_of_the_user():
    with pytest.raises(KeyboardInterrupt), blame("it fails", every_error=True):
        raise KeyboardInterrupt


@pytest.mark.parametrize(("place", "kind"), by_rotation(ENDING), ids=str)
def test_run_that_fails_names_the_line_and_continues_as_if_it_had_not(tmp_path, undisturbed, place, kind):
    folder = tmp_path / "run"
    armed[place[0]] = ERRORS[kind], place[1]
    with pytest.raises(InputError) as caught:
        fit(folder)
    armed.clear()
    assert kind == "subclass" or f"({__file__}:" in str(caught.value)
    if folder.exists():
        assert read_config(folder)["train"]["steps"] == STEPS
        assert [event["message"] for event in read_rows(folder / EVENTS)][-1] == str(caught.value)
        assert checkpoint.newest_intact(folder / "checkpoints")[1] == []
        assert numbers(folder) == undisturbed[2][: len(numbers(folder))]
        assert fit(folder) == undisturbed


@pytest.mark.parametrize(("place", "kind"), by_rotation(NOTED), ids=str)
def test_run_that_can_do_without_continues_and_notes_the_line(tmp_path, undisturbed, place, kind):
    folder = tmp_path / "run"
    armed[place] = ERRORS[kind], 1
    assert fit(folder) == undisturbed
    said = [event.get("text") or event["message"] for event in read_rows(folder / EVENTS)]
    assert [sentence for sentence in said if f"({__file__}:" in sentence]


@pytest.mark.parametrize("kind", ["exit", "lost file", "base"])
def test_command_that_calls_the_recipe_names_the_line(typed, tmp_path, kind):
    (tmp_path / "mine.py").write_text("from tests.train.test_user_faults import Recipe\n")
    train = ["train", f"{tmp_path}/mine.py:Recipe", "--steps", "1", "--batch", "8", "--run", f"{tmp_path}/run"]
    assert typed(*train)[0] == 0
    armed["sample"] = ERRORS[kind], 1
    code, out, err = typed("sample", f"{tmp_path}/run")
    assert (code, out) == (2, "") and "error: the recipe fails: " in err and f"({__file__}:" in err
