"""What a recipe may have and do beside its contract: who needs one asks `isinstance(recipe, …)`; nobody inherits."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.train.recipe import Recipe, State

if TYPE_CHECKING:
    import numpy as np

DEFAULTS = ("steps", "batch", "accumulate", "clip", "freeze", "decay", "ema", "seed", "outer")
"""Run settings for which a recipe may set defaults."""
FORMS = ("remat", "accumulate")
PLATFORMS = ("cpu", "gpu", "tpu")
SAMPLED = 200
"""Tokens of the sample in a report."""


@runtime_checkable
class SavesMemory(Protocol):
    """Its programs can be computed in ways that need less memory, and more time."""

    forms: tuple[str, ...]
    """Those that program/compiled.py may choose unasked: `remat`, `accumulate`."""


@runtime_checkable
class SetsCompiler(Protocol):
    """Its programs are compiled with options of XLA's."""

    compiling: Mapping[str, Mapping[str, Any]]
    """Platform → option → value."""


@runtime_checkable
class GivesMeaning(Protocol):
    """Its parameters mean nothing without some of its options, such as the tokenizer."""

    identity: tuple[str, ...]
    """Their names; `--init-from` copies them."""


@runtime_checkable
class LooksForData(Protocol):
    """Its data may be missing."""

    def require_data(self) -> None:
        """Raise InputError where its data is not there; asked before JAX is loaded, so it only takes a glance."""


@runtime_checkable
class SharesData(Protocol):
    """Its data lies on one machine; a recipe that makes it, or reads it from where every machine can, needs no such."""

    def share(self, folder: Path) -> dict[str, Any]:
        """Put prepared data into `folder`, which is brought to the members of a swarm; the options to read it there."""


@runtime_checkable
class KeepsFiles(Protocol):
    """It needs more than its options to be built again."""

    home: Path | None
    """The run it is rebuilt for, or whose parameters it starts from: the folder that `keep` wrote to."""

    def keep(self, folder: Path) -> None:
        """Write into a run's folder, its `home` when it is built again, what is too large for `options()`."""


@runtime_checkable
class ReadsPublished(Protocol):
    """It can begin with parameters that are no run of ours."""

    def load_shared(self, place: str, like: Any) -> Any:
        """Parameters at `place`: what `exchange().get` gives, in the shardings of `like`."""


@runtime_checkable
class DescribesPublished(Protocol):
    """They mean something with other options than its own; asked of the class, before there is a recipe."""

    @classmethod
    def options_at(cls, place: str) -> dict[str, Any]:
        """The options that give the parameters at `place` their meaning; InputError for an unknown one."""


@runtime_checkable
class ComparesPublished(Protocol):
    """It can do so over several hosts."""

    def shared_digest(self, place: str) -> str:
        """What tells the parameters of `load_shared` from others at the same place, on another host's disk, say."""


@runtime_checkable
class WritesText(Protocol):
    """Its model continues a text."""

    def sample(self, state: State, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
        """A continuation of `prompt` by a trained state."""


@runtime_checkable
class MakesPictures(Protocol):
    """Its model makes pictures."""

    def grids(
        self, state: State, rows: int, columns: int, *, truncation: float, seed: int, count: int = 1
    ) -> "Iterator[np.ndarray]":
        """Pictures of a trained state side by side, uint8 (height, width, 3).

        truncation: how far from the mean picture they may be, 0 to 1; count: of them, on a closed walk from the first.
        """


@runtime_checkable
class FindsCodes(Protocol):
    """Its model finds the code of a picture."""

    def read_picture(self, path: Path) -> "np.ndarray":
        """A picture of a file as the data has them, uint8 (side, side, 3)."""

    def project(
        self, state: State, picture: "np.ndarray", steps: int, seed: int, far: Callable[[int, int], None]
    ) -> Any:
        """The code of a picture, and what the model makes of it (recipes/stylegan2/projection.py)."""


@runtime_checkable
class ShowsPicture(Protocol):
    """What it learns can be seen."""

    def pictured(self, state: State) -> "np.ndarray | None":
        """A picture uint8 (height, width, 3) of what is learnt so far, made at each evaluation; None: nothing yet."""


@runtime_checkable
class HasHooks(Protocol):
    """It brings hooks: for runs of the command line, and for a swarm, which calls those of evaluations."""

    def hooks(self) -> Sequence[Any]:
        """Those of `Trainer(hooks=…)`; asked in each process that calls them."""


@runtime_checkable
class HasLoggers(Protocol):
    """It brings loggers: for runs of the command line, and for a swarm, where the process of the command writes."""

    def loggers(self) -> Sequence[Any]:
        """Those of `Trainer(loggers=…)`."""


@runtime_checkable
class Measured(Protocol):
    """Its losses do not say all."""

    def measures(self, state: State, features: str | None, far: Callable[[int, int], None]) -> dict[str, Any]:
        """What `evaluate` says of a trained state beside its losses.

        features: `file.py:name` of a function of the user's to compare by; far: told how many of how many are done.
        """


@runtime_checkable
class Exports(Protocol):
    """Its model can leave."""

    def export(self, state: State, folder: Path) -> None:
        """Write a trained state into `folder` in Hugging Face's form."""


def check_recipe(recipe: Any, options: Iterable[str] | None = None) -> None:
    """Raise InputError for what is no recipe, and for an attribute of one that names what there is not.

    options: the names of those it is built with, where they are known.
    """
    if not isinstance(recipe, Recipe):
        raise InputError(
            f"what is trained is a recipe, not a {type(recipe).__name__}: give what `supervised(...)` returns"
        )
    of = type(recipe).__name__
    if not isinstance(recipe.name, str):
        raise InputError(f"{of}.name is a {type(recipe.name).__name__}, not a text")
    check_defaults(recipe.defaults, f"{of}.defaults")
    if isinstance(recipe, SavesMemory):
        _check_names(recipe.forms, f"{of}.forms", FORMS)
    _check_names(identity_of(recipe), f"{of}.identity, a tuple of options,", options)
    if isinstance(recipe, SetsCompiler):
        if not isinstance(recipe.compiling, Mapping):
            raise InputError(f"{of}.compiling is a {type(recipe.compiling).__name__}, not a dict by platform")
        _check_names(recipe.compiling, f"{of}.compiling, a dict by platform,", PLATFORMS)
        for platform, each in recipe.compiling.items():
            if not isinstance(each, Mapping):
                raise InputError(f"{of}.compiling has a {type(each).__name__} for {platform}, not {{option: value}}")


def check_defaults(defaults: Any, what: str) -> None:
    """Raise InputError for what are no run settings by name."""
    if not isinstance(defaults, Mapping):
        raise InputError(f'{what} is a {type(defaults).__name__}, not a dict such as {{"steps": 400}}')
    _check_names(defaults, what, DEFAULTS)


def identity_of(recipe: Any) -> tuple[str, ...]:
    """`identity` of a recipe or of a class of recipes; nothing where it has none."""
    if not isinstance(recipe, GivesMeaning):
        return ()
    _check_names(recipe.identity, f"{getattr(recipe, '__name__', type(recipe).__name__)}.identity", None)
    return tuple(recipe.identity)


def _check_names(names: Any, what: str, known: Iterable[str] | None) -> None:
    if isinstance(names, str) or not isinstance(names, Collection):
        raise InputError(f"{what} is a {type(names).__name__}, not a tuple of names")
    for name in names:
        if known is not None and name not in known:
            raise InputError(f"{what} takes no {name}; {did_you_mean(str(name), known)}")


def sampled(recipe: Recipe, state: State) -> str | None:
    """A short sample for a report; None where the model writes none. A fault in `sample` is told in its place."""
    if not isinstance(recipe, WritesText):
        return None
    try:
        return recipe.sample(state, "", tokens=SAMPLED, temperature=0.8, seed=0)
    except InputError:
        return None
    except Exception as error:  # noqa: BLE001  # a user's method; the run has succeeded, whatever it does
        return f"no sample: {type(error).__name__}: {error}"
