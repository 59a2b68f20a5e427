"""Check every request where it reaches a process: a malformed one is refused, and ends nothing.

A method decorated with `request` may be called by other processes. Its annotations are the protocol.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from typing import Annotated, Any, get_type_hints

import numpy as np
from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError

from tpuswarm.swarm.core.arithmetic.outer import MovingAverage
from tpuswarm.swarm.core.messages import Refused
from tpuswarm.swarm.core.values import Header, Incarnation
from tpuswarm.swarm.storage.objects import MEMBER_NAME

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 in hexadecimal."""
MemberName = Annotated[str, StringConstraints(pattern=f"^{MEMBER_NAME.pattern}$")]

MAX_INTEGER = 2**63 - 1
_DIGEST, _INCARNATION = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9A-Za-z]{1,64}")
_STRICT = ConfigDict(strict=True, revalidate_instances="always", arbitrary_types_allowed=True)


class Malformed(ValueError):
    """A request with a value that no member sends."""


def request(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let other processes call a method; answer Refused if an argument has another type or an impossible value."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    required = sum(parameter.default is parameter.empty for parameter in parameters)

    @cache
    def adapter() -> TypeAdapter[tuple[Any, ...]]:
        hints = get_type_hints(inspect.unwrap(method), include_extras=True)
        types: Any = tuple[*(hints[parameter.name] for parameter in parameters)]  # type: ignore[misc]
        return TypeAdapter(types, config=_STRICT)

    @wraps(method)
    def checked(self: Any, *arguments: Any) -> Any:
        if not required <= len(arguments) <= len(parameters):
            return Refused(f"{method.__name__} takes {len(parameters)} arguments, not {len(arguments)}")
        defaults = (parameter.default for parameter in parameters[len(arguments) :])
        try:
            values = adapter().validate_python((*arguments, *defaults))
            _check(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = parameters[int(first["loc"][0])].name
            where = ".".join([name, *(str(part) for part in first["loc"][1:])])
            return Refused(f"{method.__name__} is malformed: {where}: {first['msg']}")
        except Malformed as error:
            return Refused(f"{method.__name__} is malformed: {error}")
        return method(self, *values)

    vars(checked)["is_request"] = True
    return checked


def call_request(server: Any, method: Any, arguments: Any) -> Any:
    """Call a method of a process for another one; answer Refused if it is no request."""
    if not (isinstance(method, str) and isinstance(arguments, tuple)):
        return Refused(f"a call is a method's name and its arguments, not {type(method)} and {type(arguments)}")
    handler = getattr(type(server), method, None)
    if not getattr(handler, "is_request", False):
        return Refused(f"{type(server).__name__} has no request {method!r}")
    return getattr(server, method)(*arguments)


def _check(value: Any) -> None:
    """Raise Malformed for a number or a name that no message has; types are checked before."""
    if isinstance(value, str | bytes):
        return
    if isinstance(value, int):
        if not 0 <= value <= MAX_INTEGER:
            raise Malformed("a count is negative or above 2^63")
    elif isinstance(value, float):
        if not value >= 0:
            raise Malformed(f"{value} is negative or not a number")
        if value == float("inf"):
            raise Malformed("a value is infinite")
    elif isinstance(value, Mapping):
        for part in (*value.keys(), *value.values()):
            _check(part)
    elif isinstance(value, tuple | list | frozenset):
        for part in value:
            if part.__class__ is not str:  # a state has hundreds of digests
                _check(part)
    elif is_dataclass(value):
        _check_fields(value)


def _check_fields(value: Any) -> None:
    if isinstance(value, Incarnation) and not (
        MEMBER_NAME.fullmatch(value.member) and _INCARNATION.fullmatch(value.name)
    ):
        raise Malformed(f"{value.member!r} with {value.name!r} cannot name an incarnation")
    if isinstance(value, Header):
        if not all(_DIGEST.fullmatch(digest) for digest in value.digests):
            raise Malformed("a digest is not SHA-256 in hexadecimal")
        if not (value.finite or value.norm == 0):
            raise Malformed(f"the norm is {value.norm}, although the contribution is not finite")
    for name in _field_names(value.__class__):
        part = getattr(value, name)
        if not (isinstance(value, MovingAverage) and part == float("inf")):
            _check(part)


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def is_array(value: np.ndarray, dtype: str, dimensions: int) -> bool:
    return type(value) is np.ndarray and value.dtype == np.dtype(dtype) and value.ndim == dimensions
