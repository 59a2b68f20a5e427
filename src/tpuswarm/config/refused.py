"""What pydantic says of a value, as we say it."""

import json
import re
from collections.abc import Mapping
from typing import Any

KINDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "a text",
    "a valid boolean": "true or false",
    "a valid list": "a list",
    "a valid array": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "a table",
}


def must_be(message: str) -> str:
    """`Input should be a valid integer, unable to parse string as an integer` as `must be a whole number`."""
    if not (found := re.match(r"Input should be (a valid \w+)?(.*)", message)):
        return message[:1].lower() + message[1:]
    kind, rest = found.groups()
    return f"must be {KINDS[kind] if kind in KINDS else (kind or '') + rest}"


def refused(error: Mapping[str, Any]) -> str:
    """The same with the value, from one of the errors of a ValidationError."""
    given = error["input"]
    such = f" such as {json.dumps([given])}" if error["type"] == "tuple_type" and isinstance(given, str) else ""
    return f"{must_be(error['msg'])}{such}, not {given!r}"
