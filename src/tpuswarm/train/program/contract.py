"""Check that a recipe and its program keep their contract (train/recipe.py); report violations in one sentence."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tpuswarm.errors import InputError
from tpuswarm.train.paths import array_type, first_difference, leaf_paths
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.recipe import Batch, Clock, Exchange, Metrics, Options, Parameter, Program, Recipe, State, Weighted
from tpuswarm.train.user_code import blame, line_of, require_call

MAX_STRUCTURE_CHARS = 300
"""Longest pytree structure in an error."""


def program_of(recipe: Recipe, options: Options) -> Program:
    """Return the recipe's program; InputError if it is none, or if a method takes other arguments."""
    for name, method in vars(Recipe).items():
        if inspect.isfunction(method) and not name.startswith("_") and getattr(recipe, name) is not None:
            require_call(getattr(recipe, name), f"Recipe.{name}", *_arguments(method))
    with blame(f"program of {recipe.name} fails"):
        program = recipe.program(options)
    if not isinstance(program, Program):
        raise InputError(
            f"program of {recipe.name} returns a {type(program).__name__}, not a tpuswarm.Program"
            f"{line_of(recipe.program)}"
        )
    for name in sorted(Program.__abstractmethods__):
        require_call(getattr(program, name), f"Program.{name}", *_arguments(getattr(Program, name)))
    return program


def _arguments(method: Any) -> list[str]:
    """Return the argument names of a method, as `require_call` takes them."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [parameter.name + "=" * (parameter.kind is parameter.KEYWORD_ONLY) for parameter in parameters]


def abstract_state(program: Program, name: str) -> State:
    """Return shapes and dtypes of a fresh state; InputError for a leaf that is no array of numbers."""

    def init(key: jax.Array) -> State:
        state = program.init(key)
        for path, leaf in zip(leaf_paths(state), jax.tree.leaves(state), strict=True):
            if array_type(leaf) is None:
                raise InputError(
                    f"{path} of the state that init of {name} returns is a {type(leaf).__name__}: a state holds arrays "
                    f"of numbers alone{line_of(program.init)}"
                )
        return state

    return jax.eval_shape(init, jax.eval_shape(lambda: run_key(0)))


def batch_spec(program: Program, name: str, size: int) -> dict[str, Any]:
    """Return shapes and dtypes of a batch of `size` rows; InputError if the program returns anything else."""
    with blame(f"batch_spec of {name} fails"):
        spec = program.batch_spec(size)
    place = line_of(program.batch_spec)
    if not isinstance(spec, Mapping) or not spec:
        raise InputError(
            f"batch_spec of {name} returns {type(spec).__name__} {spec!r}, not a dict of jax.ShapeDtypeStruct by name"
            f"{place}"
        )
    for key, leaf in spec.items():
        if getattr(leaf, "shape", ())[:1] != (size,):
            raise InputError(
                f"batch_spec({size}) of {name} has {leaf} for {key}, not a jax.ShapeDtypeStruct whose first axis is "
                f"the {size} rows{place}"
            )
    return dict(spec)


def check_exchange(program: Program, name: str, state: State) -> None:
    """Raise InputError unless `exchange` and `parameters` describe the same leaves of an abstract state."""
    with blame(f"exchange of {name} fails"):
        exchange = program.exchange()
        if not isinstance(exchange, Exchange):
            raise InputError(
                f"exchange of {name} returns a {type(exchange).__name__}, not a tpuswarm.Exchange(get, put)"
                f"{line_of(program.exchange)}"
            )
        shared = leaf_paths(exchange.get(state))
    with blame(f"parameters of {name} fails"):
        parameters = program.parameters(state)
    place = line_of(program.parameters)
    if not isinstance(parameters, list | tuple):
        raise InputError(
            f"parameters of {name} returns a {type(parameters).__name__}, not a list of tpuswarm.Parameter{place}"
        )
    for entry in parameters:
        if not isinstance(entry, Parameter):
            raise InputError(f"parameters of {name} returns {entry!r} among others, not a tpuswarm.Parameter{place}")
    if len(parameters) != len(shared):
        raise InputError(
            f"parameters of {name} returns {len(parameters)} entries, and the leaves of exchange().get(state) are "
            f"{len(shared)} ({', '.join(shared)[:MAX_STRUCTURE_CHARS]}): it returns one for each, in that order{place}"
        )


def checked_step(program: Program, name: str, before: State) -> Callable[[State, Batch, Clock], tuple[State, Metrics]]:
    """Return `program.step`, whose result is checked when it is traced, with a key for each step.

    before: the abstract state that it gets. The clock's key is the run's; the step's key also depends on its number.
    """

    def step(state: State, batch: Batch, clock: Clock) -> tuple[State, Metrics]:
        clock = clock._replace(key=jax.random.fold_in(clock.key, clock.step))
        out: Any = program.step(state, batch, clock)
        place = line_of(program.step)
        if type(out) is not tuple or len(out) != 2:
            many = f" of {len(out)}" if isinstance(out, tuple) else ""
            raise InputError(
                f"step of {name} returns a {type(out).__name__}{many}, not (state, dict of metrics){place}"
            )
        after, metrics = out
        if different := first_difference(before, after):
            path, was, now = different
            raise InputError(
                f"step of {name} was given {was} {path} in its state, and returns {now}: a state keeps its keys, "
                f"shapes and dtypes{place}"
            )
        given, returned = (str(jax.tree.structure(state)) for state in (before, after))
        if given != returned:
            raise InputError(
                f"step of {name} returns its state as {returned[:MAX_STRUCTURE_CHARS]}, and was given "
                f"{given[:MAX_STRUCTURE_CHARS]}{place}"
            )
        _check_metrics(metrics, f"step of {name}", name, place)
        return after, metrics

    return step


def checked_evaluate(program: Program, name: str) -> Callable[[State, Batch], Metrics]:
    """Return `program.evaluate`, whose result is checked when it is traced."""

    def evaluate(state: State, batch: Batch) -> Metrics:
        metrics = program.evaluate(state, batch)
        _check_metrics(metrics, f"evaluate of {name}", name, line_of(program.evaluate), may_be_weighted=True)
        return metrics

    return evaluate


def _check_metrics(metrics: Any, method: str, name: str, place: str, may_be_weighted: bool = False) -> None:
    """Raise InputError unless the metrics are scalars by name, `loss` among them."""
    if not isinstance(metrics, Mapping):
        raise InputError(
            f"{method} returns a {type(metrics).__name__}, not a dict of metrics, `loss` among them{place}"
        )
    if "loss" not in metrics:
        there = f"only {', '.join(map(str, metrics))}" if metrics else "none at all"
        raise InputError(f"{method} returns no metric `loss`, {there}: a run needs it{place}")
    for key, value in metrics.items():
        for part in value if may_be_weighted and isinstance(value, Weighted) else (value,):
            if array_type(part) is None:
                raise InputError(f"metric {key} of {name} is a {type(part).__name__}, it must be a scalar{place}")
            if jax.numpy.shape(part):
                raise InputError(
                    f"metric {key} of {name} has shape {jax.numpy.shape(part)}, it must be a scalar: give its mean"
                    f"{place}"
                )
