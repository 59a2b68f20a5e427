"""tpuswarm: train one model on all the Cloud TPUs a person can get.

The public API, flat. Nothing heavy is imported before a name is used.
"""

TYPE_CHECKING = False  # nothing at all is imported: until the command has its first line, Ctrl-C shows a traceback

if TYPE_CHECKING:
    from typing import Any

    from tpuswarm.errors import InputError, NoSuchSplit, RunFailed, TpuswarmError
    from tpuswarm.train.data.arrays import cpu_keys, shapes, to_jax, to_numpy, to_torch
    from tpuswarm.train.data.indexed import IndexedSource
    from tpuswarm.train.data.source import ArraySource
    from tpuswarm.train.data.stream import StreamSource
    from tpuswarm.train.look.outputs import Logger
    from tpuswarm.train.loop.hooks import EarlyStopping, Every, ReduceOnPlateau, ScaleLearningRate, Step, Stop
    from tpuswarm.train.loop.result import Result
    from tpuswarm.train.recipe import Average, Clock, Exchange, Options, Parameter, Program, Recipe, Source, Weighted
    from tpuswarm.train.run.trees import load, save
    from tpuswarm.train.supervised import supervised
    from tpuswarm.train.trainer import Trainer

_HOME = {
    "ArraySource": "train.data.source",
    "Average": "train.recipe",
    "Clock": "train.recipe",
    "EarlyStopping": "train.loop.hooks",
    "Every": "train.loop.hooks",
    "Exchange": "train.recipe",
    "IndexedSource": "train.data.indexed",
    "InputError": "errors",
    "Logger": "train.look.outputs",
    "NoSuchSplit": "errors",
    "Options": "train.recipe",
    "Parameter": "train.recipe",
    "Program": "train.recipe",
    "Recipe": "train.recipe",
    "ReduceOnPlateau": "train.loop.hooks",
    "Result": "train.loop.result",
    "RunFailed": "errors",
    "ScaleLearningRate": "train.loop.hooks",
    "Source": "train.recipe",
    "Step": "train.loop.hooks",
    "Stop": "train.loop.hooks",
    "StreamSource": "train.data.stream",
    "TpuswarmError": "errors",
    "Trainer": "train.trainer",
    "Weighted": "train.recipe",
    "cpu_keys": "train.data.arrays",
    "load": "train.run.trees",
    "save": "train.run.trees",
    "shapes": "train.data.arrays",
    "supervised": "train.supervised",
    "to_jax": "train.data.arrays",
    "to_numpy": "train.data.arrays",
    "to_torch": "train.data.arrays",
}

__all__ = [
    "ArraySource",
    "Average",
    "Clock",
    "EarlyStopping",
    "Every",
    "Exchange",
    "IndexedSource",
    "InputError",
    "Logger",
    "NoSuchSplit",
    "Options",
    "Parameter",
    "Program",
    "Recipe",
    "ReduceOnPlateau",
    "Result",
    "RunFailed",
    "ScaleLearningRate",
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
