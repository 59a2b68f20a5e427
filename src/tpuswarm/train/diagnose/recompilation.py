"""Find functions of the user's code that JAX compiles again and again, and the argument to blame.

The training step is compiled once. The user's loop and data source may call other functions. JAX's own report
(`jax_explain_cache_misses`) warns of every trace, on the terminal of the live view; so this reads the arguments in the
frame in which jax.jit misses its cache.
"""

import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jax

from tpuswarm.train.diagnose.finding import Finding, line_of_frame, user_frame

COMPILED_EVENT = "backend_compile_duration"
EVENTS = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", COMPILED_EVENT)
NEW_WRAPPER = "it is wrapped in jax.jit anew for each call"
MIN_STEPS = 3
"""Report a function that is compiled at one line in so many steps; two shapes are usual."""


@dataclass
class _Function:
    """The compilations of one function at one line."""

    name: str
    place: str
    count: int = 0
    seconds: float = 0.0
    steps: set[int] = field(default_factory=set)
    newest: Callable[[], Any] = lambda: None
    """Weak reference to the function object that was compiled last."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Shape and dtype, or value, of each leaf in the newest compilation."""
    change: str = ""
    """Why the newest compilation was needed."""


class Recompilation:
    """Listens to JAX's compilations between `start` and `stop`.

    on_compile(seconds): called for tracing and compiling by the thread that called `start`.
    """

    def __init__(self, on_compile: Callable[[float], None]):
        self._on_compile = on_compile
        self._functions: dict[tuple[str, str], _Function] = {}
        self._new: list[_Function] = []
        self._thread, self._step = 0, 0
        self._counted: list[tuple[float, float]] = []
        """Start and length of counted events, the newest last."""

    def start(self) -> None:
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def stop(self) -> None:
        with suppress(AssertionError):  # other code cleared all listeners
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def new_findings(self, step: int) -> list[Finding]:
        """Return functions that were compiled too often by now, each once; `step` comes next."""
        self._step = step
        new, self._new = self._new, []
        return [_finding(function) for function in new]

    def totals(self) -> list[Finding]:
        """Return all reported functions with their final counts."""
        return [_finding(function) for function in self._functions.values() if len(function.steps) >= MIN_STEPS]

    def _listen(self, event: str, duration_secs: float, **details: Any) -> None:
        if not event.endswith(EVENTS):
            return
        if threading.get_ident() == self._thread:
            self._count_time(duration_secs)
        frame = user_frame(sys._getframe(1)) if self._step and event.endswith(COMPILED_EVENT) else None
        if frame is None:
            return
        with suppress(Exception):  # advice must not end the user's call
            self._count(frame, str(details.get("fun_name", "a function")), duration_secs)

    def _count_time(self, seconds: float) -> None:
        """Report the time of an event that just ended, except the time of events inside."""
        start, inner_s = time.perf_counter() - seconds, 0.0
        while self._counted and self._counted[-1][0] >= start:
            inner_s += self._counted.pop()[1]
        self._counted.append((start, seconds))
        self._on_compile(seconds - inner_s)

    def _count(self, frame: FrameType, module: str, seconds: float) -> None:
        name, place = module.removeprefix("jit(").removesuffix(")"), str(line_of_frame(frame))
        function = self._functions.setdefault((place, name), _Function(name, place))
        call = _call_being_compiled()
        if call is not None:
            target, arguments = call
            if function.count:
                function.change = _explain(function.arguments, arguments, function.newest() is not target)
            function.arguments = arguments
            function.newest = weakref.ref(target)
        function.count += 1
        function.seconds += seconds
        if self._step not in function.steps:
            function.steps.add(self._step)
            if len(function.steps) == MIN_STEPS:
                self._new.append(function)


def _explain(before: Mapping[str, str], now: Mapping[str, str], is_new_wrapper: bool) -> str:
    """Return the difference between two calls of a function in words."""
    differences = [
        f"{name} was {before[name]}, now {now[name]}" for name in now if name in before and before[name] != now[name]
    ]
    if differences:
        more = f" and {len(differences) - 2} more" if len(differences) > 2 else ""
        return f"its argument {', '.join(differences[:2])}{more}"
    if before.keys() != now.keys():
        return f"it got {len(now)} arrays, {len(before)} before"
    return NEW_WRAPPER if is_new_wrapper else "its arguments look the same, so a setting or a sharding differs"


def _call_being_compiled() -> tuple[Any, dict[str, str]] | None:
    """Return the function that JAX is compiling, and its arguments in words; None if JAX hides them.

    jax.jit has them in the frame of `cache_miss` (JAX 0.10).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "cache_miss":
        frame = frame.f_back
    if frame is None or not {"fun", "args", "kwargs"} <= frame.f_locals.keys():
        return None
    function, args, kwargs = (frame.f_locals[name] for name in ("fun", "args", "kwargs"))
    try:
        arguments: Any = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # a callable without a signature
        arguments = {"arguments": args, **kwargs}
    leaves, _ = jax.tree_util.tree_flatten_with_path(arguments)
    return function, {f"{path[0].key}{jax.tree_util.keystr(path[1:])}": _describe(leaf) for path, leaf in leaves}


def _describe(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        weak = ", weakly typed" if getattr(leaf, "weak_type", False) else ""
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]{weak}"
    return repr(leaf)[:60]


def _finding(function: _Function) -> Finding:
    cause = f": {function.change}" if function.change else ""
    remedy = "give it arrays of one shape and dtype: pad what varies, drop a last batch that is not full"
    if function.change == NEW_WRAPPER:
        remedy = "call jax.jit once, before the loop"
    return Finding(
        "recompilation",
        f"{function.name}, called at {function.place}, was compiled {function.count} times in "
        f"{len(function.steps)} steps ({function.seconds:.1f} s){cause}; {remedy}",
        {
            "function": function.name,
            "place": function.place,
            "count": function.count,
            "seconds": function.seconds,
            "change": function.change,
        },
    )
