"""Check every request where it reaches a process: a malformed one is refused, and ends nothing.

A method decorated with `request` may be called by other processes. Its annotations are the protocol.
"""

import inspect
import re
from collections.abc import Callable
from functools import cache, wraps
from typing import Annotated, Any, get_type_hints

import numpy as np
from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError
from pydantic_core import CoreConfig, SchemaValidator, core_schema

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


def request(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let other processes call a method; answer Refused if an argument has another type or an impossible value."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    required = sum(parameter.default is parameter.empty for parameter in parameters)

    @cache
    def validator() -> SchemaValidator:
        hints = get_type_hints(inspect.unwrap(method), include_extras=True)
        types: Any = tuple[*(hints[parameter.name] for parameter in parameters)]  # type: ignore[misc]
        schema = TypeAdapter(types, config=_STRICT).core_schema
        return SchemaValidator(_limited(schema), CoreConfig(strict=True, revalidate_instances="always"))

    @wraps(method)
    def checked(self: Any, *arguments: Any) -> Any:
        if not required <= len(arguments) <= len(parameters):
            return Refused(f"{method.__name__} takes {len(parameters)} arguments, not {len(arguments)}")
        defaults = (parameter.default for parameter in parameters[len(arguments) :])
        try:
            values = validator().validate_python((*arguments, *defaults))
        except ValidationError as error:
            first = error.errors()[0]
            name = parameters[int(first["loc"][0])].name
            where = ".".join([name, *(str(part) for part in first["loc"][1:])])
            return Refused(f"{method.__name__} is malformed: {where}: {first['msg']}")
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


def _limited(schema: Any, may_be_infinite: bool = False) -> Any:
    """Limit the numbers and names of pydantic's schema to what members send."""
    if isinstance(schema, list):
        return [_limited(part, may_be_infinite) for part in schema]
    if not isinstance(schema, dict):
        return schema
    may_be_infinite |= schema.get("cls") is MovingAverage
    limited = {key: _limited(part, may_be_infinite) for key, part in schema.items()}
    if limited.get("type") == "int":
        limited |= {"ge": 0, "le": MAX_INTEGER}
    elif limited.get("type") == "float":
        limited |= {"ge": 0.0, "allow_inf_nan": may_be_infinite}
    if check := _CHECKS.get(schema.get("cls")):
        ref = limited.pop("ref", None)
        return core_schema.no_info_after_validator_function(check, limited, ref=ref)
    return limited


def _check_incarnation(incarnation: Incarnation) -> Incarnation:
    if not (MEMBER_NAME.fullmatch(incarnation.member) and _INCARNATION.fullmatch(incarnation.name)):
        raise ValueError(f"{incarnation.member!r} with {incarnation.name!r} cannot name an incarnation")
    return incarnation


def _check_header(header: Header) -> Header:
    if not all(map(_DIGEST.fullmatch, header.digests)):
        raise ValueError("a digest is not SHA-256 in hexadecimal")
    if not (header.finite or header.norm == 0):
        raise ValueError(f"the norm is {header.norm}, although the contribution is not finite")
    return header


_CHECKS: dict[Any, Callable[[Any], Any]] = {Incarnation: _check_incarnation, Header: _check_header}


def is_array(value: np.ndarray, dtype: str, dimensions: int) -> bool:
    return type(value) is np.ndarray and value.dtype == np.dtype(dtype) and value.ndim == dimensions
