"""Compile a member's program; every host of a member does the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError, TpuswarmError, message_of
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.values import Digests
from tpuswarm.swarm.member import compile_cache
from tpuswarm.swarm.member.device_state import Evaluation
from tpuswarm.swarm.member.program_state import ProgramState, layout_of, place_fragments
from tpuswarm.swarm.processes.run_plan import RunPlan, code_digest, fill
from tpuswarm.train.data.placing import to_host
from tpuswarm.train.data.source import training_source
from tpuswarm.train.loop.evaluate import HeldOut, trace_evaluation
from tpuswarm.train.loop.hooks import EVALUATION, Hooks, Patience, ScaleLearningRate, Stop, merge_numbers, recipe_hooks
from tpuswarm.train.loop.resolve import held_out, request
from tpuswarm.train.loop.saver import require_finite
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.program.compiled import Compiled, compile_step
from tpuswarm.train.program.exchanged import exchanged, with_base
from tpuswarm.train.recipe import Metrics, Recipe, Source, State, supports
from tpuswarm.train.run.loaded import initial_parameters
from tpuswarm.train.user_code import blame, build_recipe

HOOK_TIMEOUT_S = 600.0
"""A hook that takes longer may look like a device that hangs."""
MAX_PICTURE_SIDE = 2048
"""Pixels of a side of a hook's picture. The supervisor writes pictures between its other work."""
OnStep = Callable[[int, Metrics], None]
"""Called for every step with its number in the run's order of batches and its metrics, still on the devices."""


@dataclass(frozen=True)
class MemberProgram:
    """A compiled program and its data."""

    compiled: Compiled
    layout: Layout
    digests: Digests
    validation: HeldOut | None
    """Held-out rows, if there are any and this member evaluates."""
    _hooks: Hooks
    _recipe: Recipe
    _plan: RunPlan
    _source: Source
    _on_step: OnStep
    _hints: set[str] = field(default_factory=set)
    """Hints about hooks that were given."""

    def facts(self) -> dict[str, str]:
        """Return the facts on which the hosts of one member must agree."""
        choice, digests = self.compiled.choice, self.digests
        return {
            "configuration": digests.config,
            "recipe file": digests.code,
            "data": digests.data,
            "parameters": digests.layout,
            "form of the program": f"{choice.shard}, remat {choice.remat}, {choice.accumulate} micro-batches",
        }

    def initialize(self) -> list[np.ndarray]:
        """Make a first state, fresh or from --init-from, as float32[size] for each fragment."""
        parent = self._plan.settings["init_from"]
        key, only = self._keys()[0], self._plan.settings.get("init_only")
        given = initial_parameters(parent, only, self._recipe, self.compiled, key) if parent else None
        state = self.compiled.init(key, given)
        shared = exchanged(self.compiled.program, state).get(state)
        require_finite(shared, parent or f"init of {self._recipe.name}")
        return self.layout.split(dict(zip(leaf_paths(shared), to_host(jax.tree.leaves(shared)), strict=True)))

    def make_state(self, fragments: Sequence[np.ndarray]) -> ProgramState:
        """Make a device state around a version, float32[size] for each fragment."""
        init_key, step_key = self._keys()
        shared = place_fragments(self.compiled, self.layout, fragments)
        swarm = self._plan.swarm
        state = self.compiled.init(init_key, with_base(self._recipe, self.compiled, shared, swarm.base))
        return ProgramState(
            self.compiled,
            self._source,
            self.layout,
            swarm.quantize,
            step_key,
            state,
            fragments,
            self._on_step,
            self.validation,
            self._inspect,
        )

    def _inspect(
        self, state: State, average: Any | None, row: dict[str, Any], allow: Callable[[float], object]
    ) -> Evaluation:
        """Make the recipe's picture of committed parameters and run the hooks on them; hook errors become texts.

        Both see a state without anything of this member's own. average: the moving average of the shared parameters,
        if the run keeps one; allow: called before each hook with the seconds that it may take.
        """
        step = row["tokens"] // (int(self._plan.settings["batch"]) * self._plan.tokens_per_row)
        found = Evaluation({"step": step, **row}, {}, [])
        due = self._hooks.with_evaluation_hooks()
        if jax.process_count() > 1:
            if due:
                self._hint(found, "a member of several hosts calls no hooks")
            return found
        if not due and not supports(self._recipe, "pictured"):
            return found
        program = self.compiled.program
        params = jax.tree.map(jnp.copy, program.exchange().get(state))
        fresh = self.compiled.init(self._keys()[0], params)
        mean = exchanged(program, fresh).average
        if average is not None and mean is not None:
            fresh = mean.put(fresh, average)
        try:
            with blame(f"{self._recipe.name}.pictured failed", every_error=True):
                picture = self._recipe.pictured(fresh)
                if picture is not None:
                    found.pictures[""] = np.array(picture)  # hooks and recipe may draw the next one into the same array
        except TpuswarmError as error:
            found.texts.append(message_of(error))
        numbers: dict[str, Any] = {}
        for index in due:
            allow(HOOK_TIMEOUT_S)
            try:
                returned = self._hooks.call(index, found.row, fresh)
                merge_numbers(numbers, returned, found.row.keys())
            except TpuswarmError as error:
                found.texts.append(message_of(error))
                continue
            if isinstance(returned, str):
                found.texts.append(returned)
            elif isinstance(returned, Stop | ScaleLearningRate):
                self._hint(found, f"a hook returned {returned}, which a swarm ignores")
            elif len(shape := tuple(getattr(returned, "shape", ()))) == 3:
                if max(shape) > MAX_PICTURE_SIDE:
                    size = "x".join(map(str, shape))
                    self._hint(found, f"a hook returned a picture of {size}: a swarm allows {MAX_PICTURE_SIDE}")
                else:
                    found.pictures[f"-{index}"] = np.array(returned)
            elif ignored := self._hooks.ignored(index, returned):
                self._hint(found, ignored)
        found.row.update(numbers)
        return found

    def _hint(self, found: Evaluation, text: str) -> None:
        """Add a hint to an evaluation, the first time only."""
        if text not in self._hints:
            self._hints.add(text)
            found.texts.append(text)

    def _keys(self) -> tuple[jax.Array, jax.Array]:
        init_key, step_key = jax.random.split(run_key(self._plan.settings["seed"]))
        return init_key, step_key


def make_program(
    plan: RunPlan,
    data: Path,
    devices: Sequence[jax.Device],
    evaluates: bool,
    on_step: OnStep,
    say: Callable[[str], None],
    batch: int | None = None,
) -> MemberProgram:
    """Build and compile the recipe, whose shared files are in the folder `data`. Raise as `compile_step` does.

    batch: rows of a step; the default is the run's batch.
    """
    batch = batch or int(plan.settings["batch"])
    recipe = build_recipe(plan.target, plan.options | fill(plan.shared, data))
    with blame(f"the data of {recipe.name} failed"):
        source = training_source(recipe, plan.settings["seed"])
    compile_cache.fetch(say)
    say(f"{recipe.name}: compiling")
    compiled = compile_step(
        recipe,
        request(plan.settings | {"batch": batch}),
        devices,
        while_compiling=partial(compile_cache.after_first, f"{plan.config}-{batch}"),
    )
    if batch != int(plan.settings["batch"]) and getattr(compiled.program, "has_step_schedule", False):
        raise InputError(
            f"the schedule of {recipe.name} counts steps of {plan.settings['batch']} rows, and this member's have "
            f"{batch}: omit --batch, or use a schedule of progress"
        )
    compile_cache.upload(say)
    layout = layout_of(compiled, plan.swarm.fragments, plan.layout)
    digests = Digests(layout.digest, plan.config, getattr(source, "digest", ""), code_digest(plan.target))
    say(f"compiled: {compiled.choice.why}")
    rows = held_out(recipe, required=False) if evaluates else None
    eval_batch = plan.settings["eval_batch"] or batch // compiled.choice.accumulate
    validation = HeldOut(rows, eval_batch) if rows is not None else None
    if validation is not None:
        trace_evaluation(compiled, recipe.name, validation)
    hooks = swarm_hooks(recipe) if evaluates else Hooks([])
    return MemberProgram(compiled, layout, digests, validation, hooks, recipe, plan, source, on_step)


def swarm_hooks(recipe: Recipe) -> Hooks:
    """Return a recipe's hooks. Raise InputError for one that a swarm cannot call."""
    every = recipe_hooks(recipe)
    for hook in every:
        if hook.every != EVALUATION or isinstance(hook.call, Patience):
            raise InputError(
                f'a swarm calls hooks only at evaluations of its commits, Every("{EVALUATION}", function), and has no '
                f"early stopping: {recipe.name} brings Every({hook.every!r}, {_name(hook.call)}); remove it"
            )
    return Hooks(every)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
