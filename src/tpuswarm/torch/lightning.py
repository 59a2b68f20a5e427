"""Read the steps and the optimizer of a LightningModule. Needs torch, but not Lightning."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from tpuswarm.errors import InputError
from tpuswarm.torch.optimizers import ConvertedOptimizer, convert_optimizer, refuse
from tpuswarm.train.recipe import is_lightning
from tpuswarm.train.user_code import blame

USED_METHODS = {"training_step", "validation_step", "configure_optimizers"}
UNUSED_METHODS = {
    "test_step", "predict_step", "prepare_data", "train_dataloader", "val_dataloader", "test_dataloader",
    "predict_dataloader",
}  # fmt: skip
"""Methods that may be left out of training on other data."""


class LightningSteps:
    """The loss of a LightningModule: its `training_step` and `validation_step`, with what they log."""

    def __call__(self, module: Any, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the loss of a batch and its metrics; module: a copy that is used for this call alone."""
        is_training = module.training or not _overrides(module, "validation_step")
        name = "training_step" if is_training else "validation_step"
        logged: dict[str, Any] = {}
        _attach(module, name, logged)
        step = getattr(module, name)
        _, *others = inspect.signature(step).parameters.values()  # batch_idx, dataloader_idx
        required = [other for other in others if other.default is other.empty and other.kind is not other.VAR_KEYWORD]
        result = step(_Batch(batch), *[0] * len(required))
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if loss is None and not is_training:
            losses = [value for key, value in logged.items() if key.endswith("loss")]
            loss = losses[0] if len(losses) == 1 else None
        if loss is None:
            way_out = "return it" if is_training else "return it, or log it under one name that ends in `loss`"
            raise InputError(f"{name} of {type(module).__name__} gives no loss of its batch; {way_out}")
        return loss, {key: value for key, value in logged.items() if key != "loss"}


class _Batch(dict[str, Any]):
    """The arrays of a batch as `training_step` takes them: `x, y = batch`, `batch[0]`, `batch["x"]` or `**batch`."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return list(self.values())[key]
        if key not in self:
            raise InputError(f"the module reads batch[{key!r}], but the data has {', '.join(self.keys())}")
        return super().__getitem__(key)


class _NoTrainer:
    """In place of Lightning's Trainer, whose counters would stay as they were when the step was traced."""

    def __init__(self, method: str):
        self._method = method

    def __getattr__(self, name: str) -> NoReturn:
        raise InputError(
            f"{self._method} reads {name} of Lightning's Trainer, which does not run here: leave it out, or train with "
            "tpuswarm.torch.recipe(module, loss, data, optimizer)"
        )


def _attach(module: Any, method: str, logged: dict[str, Any]) -> None:
    """Let a module, and modules in it, log into `logged`."""

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        if not isinstance(value, torch.Tensor | int | float):
            raise InputError(
                f"{method} logs {name} as a {type(value).__name__}, which gathers over an epoch; log its value of the "
                "batch"
            )
        logged[name] = torch.as_tensor(value).float()

    def log_dict(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            log(name, value)

    for part in filter(is_lightning, module.modules()):
        part.log, part.log_dict, part._trainer = log, log_dict, _NoTrainer(method)


def steps_of(module: Any) -> LightningSteps:
    """Return the loss of a module; raise InputError if it relies on what tpuswarm does not call."""
    name = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        raise InputError(f"{name} optimizes manually: write a Program (docs/your-own-model.md)")
    for method in dir(type(module)):
        is_lightnings = not hasattr(torch.nn.Module, method) and method not in USED_METHODS | UNUSED_METHODS
        if is_lightnings and not method.startswith("__") and _overrides(module, method):
            raise InputError(
                f"{name} overrides {method}, which tpuswarm does not call: move its work to __init__, training_step "
                "or a hook (docs/torch.md, A LightningModule)"
            )
    return LightningSteps()


def _overrides(module: Any, method: str) -> bool:
    """Return whether a class of the user replaces a method of LightningModule."""
    kinds = type(module).__mro__
    base = next(number for number, kind in enumerate(kinds) if kind.__name__ == "LightningModule")
    return hasattr(kinds[base], method) and any(method in vars(kind) for kind in kinds[:base])


def optimizer_of(module: Any) -> ConvertedOptimizer:
    """Return what `configure_optimizers` makes, for optax. Raise InputError for what has no exact form there."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    attached = copy.deepcopy(module, tensors)  # with the same parameters
    _attach(attached, "configure_optimizers", {})
    with blame("configure_optimizers fails"):
        result = attached.configure_optimizers()
    optimizer, scheduler = _one_of_each(result)
    settings = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
    unit, frequency = settings.get("interval", "epoch"), settings.get("frequency", 1)
    return convert_optimizer(module, optimizer, _entry(settings, "scheduler"), unit, frequency)


def _one_of_each(result: Any) -> tuple[Any, Any]:
    """Return the optimizer and the scheduler, or None, in one of the forms that Lightning accepts."""
    if isinstance(result, Mapping):
        return _entry(result, "optimizer"), result.get("lr_scheduler")
    if not isinstance(result, list | tuple):
        return result, None
    optimizers, schedulers = result if result and isinstance(result[-1], list | tuple) else (result, [])
    if len(optimizers) != 1 or len(schedulers) > 1:
        refuse(f"{len(optimizers)} optimizers with {len(schedulers)} schedules")
    return _one_of_each(optimizers[0]) if not schedulers else (optimizers[0], schedulers[0])


def _entry(returned: Mapping[str, Any], key: str) -> Any:
    if key not in returned:
        keys = ", ".join(map(str, returned)) or "nothing"
        raise InputError(f'configure_optimizers returns a dict with {keys}: it needs "{key}"')
    return returned[key]
