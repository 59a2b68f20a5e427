"""Functions of the user's that are compiled again and again, and the argument that is to blame.

The training step itself cannot be: it is compiled once, before the first step, and refuses other shapes. What can be
are functions that the user's own loop calls between steps, and those that a data source calls.

JAX's own word on it (`jax_explain_cache_misses`) is a warning for every trace, on the terminal that the live view draws
on, and names static arguments as it holds them; so what differs is read where `jax.jit` notices it.
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

from tpuswarm.train.diagnose.finding import Finding, place, users_frame

EVENTS = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
COMPILED = EVENTS[-1]
ANEW = "it is wrapped in jax.jit anew for each call"
MOST = 3
"""Compilations of one function at one place, each in another step, that are worth a sentence: two shapes are usual."""


@dataclass
class _Function:
    """What is known of one function at one place."""

    name: str
    place: str
    count: int = 0
    seconds: float = 0.0
    steps: set[int] = field(default_factory=set)
    newest: Callable[[], Any] = lambda: None
    """The function object that was compiled last, if it still lives."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Of the newest compilation: shape and dtype, or value, of each leaf."""
    change: str = ""
    """The newest one, in words."""


class Recompilation:
    """Listens to JAX's compilations between `start` and `stop`.

    compiled(seconds): told of time that the thread which called `start` spent on tracing and compiling.
    """

    def __init__(self, compiled: Callable[[float], None]):
        self._compiled = compiled
        self._found: dict[tuple[str, str], _Function] = {}
        self._new: list[_Function] = []
        self._thread, self._step = 0, 0
        self._counted: list[tuple[float, float]] = []
        """Start and length of what was told to `compiled`, the newest last."""

    def start(self) -> None:
        """Begin to listen."""
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def stop(self) -> None:
        """Listen no more."""
        with suppress(AssertionError):  # somebody cleared all listeners
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def look(self, step: int) -> list[Finding]:
        """Functions that have now been compiled too often, each once; `step` is the one that comes next."""
        self._step = step
        new, self._new = self._new, []
        return [_finding(each) for each in new]

    def totals(self) -> list[Finding]:
        """Every function that was said, with all its compilations."""
        return [_finding(each) for each in self._found.values() if len(each.steps) >= MOST]

    def _listen(self, event: str, duration_secs: float, **facts: Any) -> None:
        if not event.endswith(EVENTS):
            return
        if threading.get_ident() == self._thread:
            self._tell(duration_secs)
        frame = users_frame(sys._getframe(1)) if self._step and event.endswith(COMPILED) else None
        if frame is None:
            return
        with suppress(Exception):  # arguments are of all kinds, and advice must not end the call that it is about
            self._count(frame, str(facts.get("fun_name", "a function")), duration_secs)

    def _tell(self, seconds: float) -> None:
        """Pass on what just ended, without what ended inside of it."""
        start, inner = time.perf_counter() - seconds, 0.0
        while self._counted and self._counted[-1][0] >= start:
            inner += self._counted.pop()[1]
        self._counted.append((start, seconds))
        self._compiled(seconds - inner)

    def _count(self, frame: FrameType, module: str, seconds: float) -> None:
        name, where = module.removeprefix("jit(").removesuffix(")"), str(place(frame))
        function = self._found.setdefault((where, name), _Function(name, where))
        called = _called()
        if called is not None:
            fun, arguments = called
            if function.count:
                function.change = changed(function.arguments, arguments, function.newest() is not fun)
            function.arguments = arguments
            function.newest = weakref.ref(fun)
        function.count += 1
        function.seconds += seconds
        if self._step not in function.steps:
            function.steps.add(self._step)
            if len(function.steps) == MOST:
                self._new.append(function)


def changed(before: Mapping[str, str], now: Mapping[str, str], another: bool) -> str:
    """What is different between two calls of a function, in words; another: it is another object of the same code."""
    different = [
        f"{name} was {before[name]}, now {now[name]}" for name in now if name in before and before[name] != now[name]
    ]
    if different:
        more = f" and {len(different) - 2} more" if len(different) > 2 else ""
        return f"its argument {', '.join(different[:2])}{more}"
    if before.keys() != now.keys():
        return f"it got {len(now)} arrays, {len(before)} before"
    if another:
        return ANEW
    return "its arguments look the same, so a setting or a sharding differs"


def _called() -> tuple[Any, dict[str, str]] | None:
    """The function that JAX is compiling for a call, and its arguments in words; None where JAX hides them.

    They are in the frame in which jax.jit notices that it has to compile (`cache_miss` in JAX 0.10).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "cache_miss":
        frame = frame.f_back
    if frame is None or not {"fun", "args", "kwargs"} <= frame.f_locals.keys():
        return None
    fun, args, kwargs = (frame.f_locals[name] for name in ("fun", "args", "kwargs"))
    try:
        given: Any = dict(inspect.signature(fun).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # a callable without a signature
        given = {"arguments": args, **kwargs}
    leaves, _ = jax.tree_util.tree_flatten_with_path(given)
    return fun, {_name(path): _describe(leaf) for path, leaf in leaves}


def _name(path: Any) -> str:
    first, rest = path[0], path[1:]
    return f"{first.key}{jax.tree_util.keystr(rest)}"


def _describe(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        weak = ", weakly typed" if getattr(leaf, "weak_type", False) else ""
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]{weak}"
    return repr(leaf)[:60]


def _finding(function: _Function) -> Finding:
    cause = f": {function.change}" if function.change else ""
    way = "give it arrays of one shape and dtype: pad what varies, drop a last batch that is not full"
    if function.change == ANEW:
        way = "call jax.jit once, before the loop"
    return Finding(
        "recompilation",
        f"{function.name}, called at {function.place}, was compiled {function.count} times in "
        f"{len(function.steps)} steps ({function.seconds:.1f} s){cause}; {way}",
        {
            "function": function.name,
            "place": function.place,
            "count": function.count,
            "seconds": function.seconds,
            "change": function.change,
        },
    )
