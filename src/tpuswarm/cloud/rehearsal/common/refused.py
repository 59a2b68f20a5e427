"""How the local cloud says no: Google's codes, sentences and details."""

from typing import Any

INVALID_ARGUMENT = 3
NOT_FOUND = 5
ALREADY_EXISTS = 6
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
DEADLINE_EXCEEDED = 4
ABORTED = 10
UNAVAILABLE = 14


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, message: str, *details: Any):
        """`code`: google.rpc.Code; `details`: messages of google.rpc.error_details."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def status(self) -> Any:
        """As a google.rpc.Status."""
        from google.protobuf import any_pb2
        from google.rpc import status_pb2

        found = status_pb2.Status(code=self.code, message=self.message)
        for detail in self.details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            found.details.append(packed)
        return found


def not_found(name: str) -> Refused:
    """As the TPU API says it."""
    return Refused(NOT_FOUND, f"Resource '{name}' was not found")
