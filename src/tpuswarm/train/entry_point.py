"""Wrap the functions that users call: refuse wrong arguments in one sentence, and show only the user's frames."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from tpuswarm.config.nearest import OTHER_LIBRARIES_NAMES, did_you_mean
from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.train.user_code import code_owner

T = TypeVar("T", bound=Callable[..., Any])

MAIN = ("Trainer", "fit", "supervised")
"""Entry points whose arguments users often give to another one."""
_arguments: dict[str, list[str]] = {}
"""Argument names of each entry point in MAIN."""


def entry_point(target: T, name: str = "") -> T:
    """Decorate a function, a generator function, or the constructor of a class.

    Unknown arguments raise InputError. The traceback of a TpuswarmError, and of Ctrl-C, has only the user's lines and
    one of this file; any other error keeps its whole traceback. name: of the entry point, for users.
    """
    name = name or target.__name__
    if isinstance(target, type):
        target.__init__ = _wrapped(target.__init__, name)  # type: ignore[misc]
        return target
    return _wrapped(target, name)


def _wrapped(function: Any, name: str) -> Any:
    signature = inspect.signature(function)
    arguments = [parameter for parameter in signature.parameters if parameter != "self"]
    if name in MAIN:
        _arguments[name] = arguments

    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        __tracebackhide__ = True  # in IPython
        try:
            return (yield from function(*args, **kwargs))
        except TpuswarmError as error:
            raise _with_user_frames(error) from error.__cause__
        except KeyboardInterrupt as error:
            raise _interrupted(error) from None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            if unknown := next((argument for argument in kwargs if argument not in arguments), None):
                raise InputError(_unknown_argument(unknown, name, arguments))
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise InputError(_wrong_call(error, name, signature)) from error
            return run(*args, **kwargs)
        except TpuswarmError as error:
            raise _with_user_frames(error) from error.__cause__
        except KeyboardInterrupt as error:
            raise _interrupted(error) from None

    run = generate if inspect.isgeneratorfunction(function) else function
    return call


def _unknown_argument(argument: str, name: str, arguments: list[str]) -> str:
    """Return a sentence that names the right argument, or the entry point that takes this one."""
    ours = OTHER_LIBRARIES_NAMES.get(argument, argument)
    if ours not in arguments:
        for other in MAIN:
            if ours in _arguments.get(other, ()):
                return f"{name} takes no {argument}; give {ours} to {other}"
    return f"{name} takes no {argument}; {did_you_mean(argument, arguments)}"


def _wrong_call(error: TypeError, name: str, signature: inspect.Signature) -> str:
    parts = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if parameter.name != "self":
            parts.append(parameter.name if parameter.default is parameter.empty else f"{parameter.name}=…")
    hint = ""
    if "recipe" in parts:
        hint = "; a recipe holds the model and its data, as supervised(init, loss, optimizer, data) makes it"
    return f"{name} is called as {name}({', '.join(parts)}): {error}{hint}"


def _with_user_frames(error: TpuswarmError) -> TpuswarmError:
    """Leave only the user's frames in the traceback of an error and of its cause.

    All frames stay if TPUSWARM_DEBUG is set, as `tpuswarm --debug` does.
    """
    if os.environ.get("TPUSWARM_DEBUG"):
        return error
    trace = _user_frames([*_entries(error)] + ([*_entries(error.__cause__)] if error.__cause__ else []))
    error.__cause__ = None  # hides the cause
    error.__notes__ = []  # JAX's notes on removed frames
    if ipython := sys.modules.get("IPython"):  # shows an error's last frame, which is ours, without a renderer
        error._render_traceback_ = lambda: _rendered(error, ipython.get_ipython())  # type: ignore[attr-defined]
    return error.with_traceback(trace)


def _rendered(error: TpuswarmError, shell: Any) -> list[str]:
    return shell.InteractiveTB.structured_traceback(type(error), error, _user_frames([*_entries(error)]), 0)


def _interrupted(error: KeyboardInterrupt) -> KeyboardInterrupt:
    """Return a plain KeyboardInterrupt with the user's frames; any other class would end a script with code 1."""
    if os.environ.get("TPUSWARM_DEBUG"):
        return error
    return KeyboardInterrupt(*error.args).with_traceback(_user_frames([*_entries(error)]))


def _user_frames(entries: Sequence[TracebackType]) -> TracebackType | None:
    trace = None
    for entry in reversed(entries):
        if code_owner(entry.tb_frame.f_code.co_filename) == "user":
            trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _entries(error: BaseException) -> Iterator[TracebackType]:
    entry = error.__traceback__
    while entry:
        yield entry
        entry = entry.tb_next
