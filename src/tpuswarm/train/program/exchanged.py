"""What a swarm exchanges and checkpoints hold: all but the parameters of a base model, which come from its files."""

from typing import Any

import jax

from tpuswarm.errors import InputError
from tpuswarm.train.paths import overlay, select
from tpuswarm.train.program.compiled import Placed
from tpuswarm.train.recipe import Exchange, Parameter, Program, Recipe, State


def exchanged(program: Program, state: State) -> Exchange:
    """Return the exchange of all parameters but the base model's; `state` may be abstract."""
    every = program.exchange()
    is_sent = [not parameter.base for parameter in program.parameters(state)]
    if all(is_sent):
        return every
    sent = jax.tree.unflatten(jax.tree.structure(every.get(state)), is_sent)

    def complete(state: State, shared: Any) -> Any:
        return overlay(every.get(state), shared)

    average = every.average
    if average is not None:
        put = average.put
        average = average._replace(put=lambda state, shared: put(state, complete(state, shared)))
    return Exchange(
        lambda state: select(every.get(state), sent),
        lambda state, shared: every.put(state, complete(state, shared)),
        average,
    )


def exchanged_parameters(program: Program, state: State) -> list[Parameter]:
    """Return an entry for each exchanged leaf, in order; `state` may be abstract."""
    return [parameter for parameter in program.parameters(state) if not parameter.base]


def without_base(recipe: Recipe, program: Program, state: State) -> State:
    """Return a state without the base model's parameters; `state` may be abstract."""
    if recipe.base_model is None:
        return state
    return program.exchange().put(state, exchanged(program, state).get(state))


def with_base(recipe: Recipe, placed: Placed, shared: Any, digest: str | None) -> Any:
    """Return all parameters: the exchanged ones, `shared`, and the base model's; digest: as in `read_base`."""
    return shared if recipe.base_model is None else overlay(read_base(recipe, placed, digest), shared)


def read_base(recipe: Recipe, placed: Placed, digest: str | None) -> Any:
    """Return parameters that are the base model's, where it has them.

    digest: of the base model with which the run was begun. Raise InputError if it is another one here.
    """
    place = str(recipe.base_model)
    if digest != (found := recipe.shared_digest(place)):
        raise InputError(
            f"the files of {place} have changed or differ on this machine: SHA-256 {found[:12]}…, and the run began "
            f"with {str(digest)[:12]}…; restore the original"
        )
    return recipe.load_shared(place, placed.program.exchange().get(placed.state))
