"""A call of a REST API, and how one is turned down in the way of Google's older APIs."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    """What was asked."""

    path: dict[str, str]
    """The names in the route."""
    query: dict[str, str]
    body: dict[str, Any]


Handler = Callable[[Call], Any]


class Rejected(Exception):
    """An answer that is an error, with HTTP's status and the reason that Google's older APIs give."""

    def __init__(self, status: int, reason: str, message: str):
        """As in `{"error": {"errors": [{"reason": …}]}}`."""
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "code": status,
                "message": message,
                "errors": [{"message": message, "domain": "global", "reason": reason}],
            }
        }
