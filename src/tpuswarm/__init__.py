"""tpuswarm: train one model on all the Cloud TPUs a person can get.

The public API, flat. Nothing heavy is imported before a name is used.
"""

TYPE_CHECKING = False  # nothing at all is imported: until the command has its first line, Ctrl-C shows a traceback

if TYPE_CHECKING:
    from typing import Any

    from tpuswarm.errors import InputError, RunFailed, TpuswarmError
    from tpuswarm.train.adapters import IndexedSource, StreamSource
    from tpuswarm.train.arrays import cpu_keys, shapes, to_jax, to_numpy, to_torch
    from tpuswarm.train.hooks import EarlyStopping, Every, Step, Stop
    from tpuswarm.train.outputs import Logger
    from tpuswarm.train.recipe import Clock, Exchange, Options, Parameter, Program, Recipe, Source, Weighted
    from tpuswarm.train.result import Result
    from tpuswarm.train.source import ArraySource
    from tpuswarm.train.supervised import supervised
    from tpuswarm.train.trainer import Trainer
    from tpuswarm.train.trees import load, save

_HOME = {
    "ArraySource": "train.source",
    "Clock": "train.recipe",
    "EarlyStopping": "train.hooks",
    "Every": "train.hooks",
    "Exchange": "train.recipe",
    "IndexedSource": "train.adapters",
    "InputError": "errors",
    "Logger": "train.outputs",
    "Options": "train.recipe",
    "Parameter": "train.recipe",
    "Program": "train.recipe",
    "Recipe": "train.recipe",
    "Result": "train.result",
    "RunFailed": "errors",
    "Source": "train.recipe",
    "Step": "train.hooks",
    "Stop": "train.hooks",
    "StreamSource": "train.adapters",
    "TpuswarmError": "errors",
    "Trainer": "train.trainer",
    "Weighted": "train.recipe",
    "cpu_keys": "train.arrays",
    "load": "train.trees",
    "save": "train.trees",
    "shapes": "train.arrays",
    "supervised": "train.supervised",
    "to_jax": "train.arrays",
    "to_numpy": "train.arrays",
    "to_torch": "train.arrays",
}

__all__ = [
    "ArraySource",
    "Clock",
    "EarlyStopping",
    "Every",
    "Exchange",
    "IndexedSource",
    "InputError",
    "Logger",
    "Options",
    "Parameter",
    "Program",
    "Recipe",
    "Result",
    "RunFailed",
    "Source",
    "Step",
    "Stop",
    "StreamSource",
    "TpuswarmError",
    "Trainer",
    "Weighted",
    "cpu_keys",
    "load",
    "save",
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
    if name == "torch":
        import importlib

        return importlib.import_module("tpuswarm.torch")
    raise AttributeError(f"module 'tpuswarm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
