"""Convert an optimizer of torch, and its learning rate scheduler, to optax. Needs torch."""

import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from tpuswarm.errors import InputError
from tpuswarm.train.optimizer import default_decay_mask
from tpuswarm.train.user_code import blame

MAX_SCHEDULER_STEPS = 100_000
"""Steps of a scheduler to tabulate, which takes a second; one that changes after them ends the run there with NaN."""
IGNORED_SETTINGS = {"params", "lr", "initial_lr", "weight_decay", "foreach", "fused", "capturable", "differentiable"}
"""Settings of a parameter group that are read elsewhere, or change only how torch computes."""


class ConvertedOptimizer(NamedTuple):
    """An optimizer for `supervised`."""

    optimizer: Callable[[Any, Any], optax.GradientTransformation]
    schedule: Callable[[jax.Array], Any]
    decay: str | None
    """The run's default for `decay`; None if that is `default_decay_mask`."""
    frozen: Collection[str]
    """Parameters that the optimizer does not have."""


def refuse(what: str) -> NoReturn:
    """Raise InputError for an optimizer or schedule without an exact form in optax."""
    raise InputError(
        f"configure_optimizers makes {what}, which has no exact form here: give recipe an optax optimizer=, and "
        "schedule= if it needs one"
    )


def convert_optimizer(module: Any, optimizer: Any, scheduler: Any, unit: str, frequency: int) -> ConvertedOptimizer:
    """Return AdamW, Adam or SGD of the parameters of a module; raise InputError for others.

    scheduler: None, or one that steps every `frequency` units, `step` or `epoch`.
    """
    groups, kind = getattr(optimizer, "param_groups", None), type(optimizer)
    if groups is None or kind not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        refuse(kind.__name__)
    settings = _constant_settings(optimizer)
    for other in settings[1:]:
        if different := sorted(key for key in settings[0] if other[key] != settings[0][key]):
            refuse(f"parameter groups with different {different[0]}")
    if different_rates := {float(group["lr"]) for group in groups[1:]} - {float(groups[0]["lr"])}:
        refuse(f"parameter groups with the learning rates {float(groups[0]['lr']):g} and {min(different_rates):g}")
    decays = {float(group["weight_decay"]) for group in groups} - {0.0}
    if len(decays) > 1:
        refuse(f"parameter groups with the weight decays {', '.join(f'{decay:g}' for decay in sorted(decays))}")
    for option in ("amsgrad", "maximize", "dampening"):
        if settings[0].get(option):
            refuse(f"{kind.__name__} with {option}")
    make = _make_optimizer(settings[0], decays.pop() if decays else 0.0)
    rate = float(groups[0]["lr"])
    schedule = (lambda step: rate) if scheduler is None else _tabulate(optimizer, scheduler, unit, frequency)
    decay_by_id = {id(param): bool(group["weight_decay"]) for group in groups for param in group["params"]}
    params = dict(module.named_parameters())
    is_decayed = {name: decay_by_id[id(param)] for name, param in params.items() if id(param) in decay_by_id}
    return ConvertedOptimizer(
        make, schedule, _decay_pattern(params, is_decayed), tuple(params.keys() - is_decayed.keys())
    )


def _make_optimizer(
    settings: Mapping[str, Any], weight_decay: float
) -> Callable[[Any, Any], optax.GradientTransformation]:
    """Return a function of (learning rate, decay mask) for a group's settings."""
    if "betas" in settings:
        b1, b2 = map(float, settings["betas"])
        direction = optax.scale_by_adam(b1, b2, float(settings["eps"]))
    elif momentum := float(settings["momentum"]):
        direction = optax.trace(momentum, nesterov=settings["nesterov"])
    else:
        direction = optax.identity()
    decays_after = settings.get("decoupled_weight_decay", False)

    def make(learning_rate: Any, decay_mask: Any) -> optax.GradientTransformation:
        decay = [optax.add_decayed_weights(weight_decay, decay_mask)] if weight_decay else []
        parts = [direction, *decay] if decays_after else [*decay, direction]
        return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))

    return make


def _decay_pattern(params: Mapping[str, Any], is_decayed: Mapping[str, bool]) -> str | None:
    """Return a regular expression of the parameters with weight decay; None if `default_decay_mask` finds the same."""
    shapes = {name: jax.ShapeDtypeStruct(tuple(params[name].shape), np.float32) for name in is_decayed}
    if not any(is_decayed.values()) or default_decay_mask(shapes) == is_decayed:
        return None
    if all(is_decayed.values()):
        return "."
    return f"^({'|'.join(re.escape(name) for name, decays in is_decayed.items() if decays)})$"


def _tabulate(optimizer: Any, scheduler: Any, unit: str, frequency: int) -> Callable[[jax.Array], Any]:
    """Return the learning rate as a function of `step` or `epoch`, from the scheduler itself."""
    name = type(scheduler).__name__
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        refuse(f"{name} (tpuswarm.ReduceOnPlateau is a hook)")
    constant_settings, rates = _constant_settings(optimizer), list[float]()
    length = getattr(scheduler, "total_steps", MAX_SCHEDULER_STEPS)  # OneCycleLR raises after its last step
    with warnings.catch_warnings(), blame(f"{name} fails", every_error=True):
        warnings.simplefilter("ignore")  # the optimizer makes no steps
        for count in range(length):
            if count:
                scheduler.step()
            if count == 1 and _constant_settings(optimizer) != constant_settings:
                refuse(f"{name} that also cycles momentum (pass cycle_momentum=False)")
            different = {float(group["lr"]) for group in optimizer.param_groups}
            if len(different) > 1:
                refuse(f"{name} with different learning rates of parameter groups")
            rates += different
    table = np.array(rates, np.float32)
    is_settled = length == MAX_SCHEDULER_STEPS and bool((table[length // 2 :] == table[-1]).all())

    def rate_at(position: jax.Array) -> jax.Array:
        index = jnp.asarray(position).astype(jnp.int32) // frequency
        rate = jnp.asarray(table)[jnp.minimum(index, len(table) - 1)]
        return rate if is_settled else jnp.where(index < len(table), rate, jnp.nan)

    if unit == "step":
        return lambda step: rate_at(step)
    return lambda epoch: rate_at(epoch)


def _constant_settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: group[key] for key in group.keys() - IGNORED_SETTINGS} for group in optimizer.param_groups]
