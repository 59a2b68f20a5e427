"""Rephrase pydantic's errors in our words."""

import json
import re
from collections.abc import Mapping
from typing import Any

OUR_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "a text",
    "a valid boolean": "true or false",
    "a valid list": "a list",
    "a valid array": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "a table",
}


def rephrase_message(message: str) -> str:
    """Turn `Input should be a valid integer, unable to parse string as an integer` into `must be a whole number`."""
    if not (found := re.match(r"Input should be (a valid \w+)?(.*)", message)):
        return message[:1].lower() + message[1:]
    kind, rest = found.groups()
    return f"must be {OUR_WORDS[kind] if kind in OUR_WORDS else (kind or '') + rest}"


def describe_error(error: Mapping[str, Any]) -> str:
    """Rephrase one error of a ValidationError, with the value."""
    value = error["input"]
    example = f" such as {json.dumps([value])}" if error["type"] == "tuple_type" and isinstance(value, str) else ""
    return f"{rephrase_message(error['msg'])}{example}, not {value!r}"
