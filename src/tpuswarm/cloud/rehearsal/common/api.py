"""Requests and errors of the local cloud's APIs."""

from collections.abc import Callable
from typing import Any, NamedTuple

INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
NOT_FOUND = 5
ALREADY_EXISTS = 6
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
ABORTED = 10
UNAVAILABLE = 14


class Call(NamedTuple):
    """A REST request; `path` has the names in its route."""

    path: dict[str, str]
    query: dict[str, str]
    body: dict[str, Any]
    caller: str = ""
    """The end of its token, which `Policies.member` reads."""


Handler = Callable[[Call], Any]


class Rejected(Exception):
    """An error in the form of Google's older APIs: an HTTP status, a reason and a message."""

    def __init__(self, status: int, reason: str, message: str):
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "code": status,
                "message": message,
                "errors": [{"message": message, "domain": "global", "reason": reason}],
            }
        }


class Refused(Exception):
    """An error in the form of Google's newer APIs: a google.rpc.Code, a message and google.rpc.error_details."""

    def __init__(self, code: int, message: str, *details: Any):
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def status(self) -> Any:
        from google.protobuf import any_pb2
        from google.rpc import status_pb2

        status = status_pb2.Status(code=self.code, message=self.message)
        for detail in self.details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status


def not_found(name: str) -> Refused:
    return Refused(NOT_FOUND, f"Resource '{name}' was not found")
