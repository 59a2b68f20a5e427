"""tpuswarm: train one model on all the Cloud TPUs a person can get.

The public API, flat. Nothing heavy is imported before a name is used.
"""

TYPE_CHECKING = False  # nothing at all is imported: until the command has its first line, Ctrl-C shows a traceback

if TYPE_CHECKING:
    from typing import Any

    from tpuswarm.errors import InputError, RunFailed, TpuswarmError
    from tpuswarm.train.arrays import cpu_keys, shapes, to_jax, to_numpy, to_torch
    from tpuswarm.train.loop import Result, Step
    from tpuswarm.train.recipe import Clock, Exchange, Options, Program, Recipe, Source
    from tpuswarm.train.source import ArraySource
    from tpuswarm.train.supervised import supervised
    from tpuswarm.train.trainer import Trainer

_HOME = {
    "ArraySource": "train.source",
    "Clock": "train.recipe",
    "Exchange": "train.recipe",
    "InputError": "errors",
    "Options": "train.recipe",
    "Program": "train.recipe",
    "Recipe": "train.recipe",
    "Result": "train.loop",
    "RunFailed": "errors",
    "Source": "train.recipe",
    "Step": "train.loop",
    "TpuswarmError": "errors",
    "Trainer": "train.trainer",
    "cpu_keys": "train.arrays",
    "shapes": "train.arrays",
    "supervised": "train.supervised",
    "to_jax": "train.arrays",
    "to_numpy": "train.arrays",
    "to_torch": "train.arrays",
}

__all__ = [
    "ArraySource",
    "Clock",
    "Exchange",
    "InputError",
    "Options",
    "Program",
    "Recipe",
    "Result",
    "RunFailed",
    "Source",
    "Step",
    "TpuswarmError",
    "Trainer",
    "cpu_keys",
    "shapes",
    "supervised",
    "to_jax",
    "to_numpy",
    "to_torch",
]


def __getattr__(name: str) -> "Any":
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"tpuswarm.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tpuswarm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
