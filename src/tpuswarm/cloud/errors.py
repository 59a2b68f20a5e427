"""Errors of a cloud, by what to do about them."""

from tpuswarm.errors import TpuswarmError


class CloudError(TpuswarmError):
    """The cloud refused or is not reachable; the message has its sentence."""

    code = ""
    """The cloud's own name for the reason, such as RESOURCE_EXHAUSTED, if it answered."""

    @property
    def with_code(self) -> str:
        """The sentence and the code."""
        return f"{self} ({self.code})" if self.code else str(self)


class NoCapacity(CloudError):
    """The zone has no such TPU now: retry, or use another zone."""


class NoQuota(CloudError):
    """The project may not have so many, or none there: a retry does not help."""

    def __init__(self, message: str, limit: str | None = None):
        """`limit`: the name of the quota, if known."""
        super().__init__(message)
        self.limit = limit


class Denied(CloudError):
    """The user lacks a permission."""

    exit_code = 2

    def __init__(self, message: str, permission: str | None = None):
        """`permission`: the missing one, if known, such as tpu.nodes.create."""
        super().__init__(message)
        self.permission = permission


class NotSignedIn(CloudError):
    """Credentials are missing or expired."""

    exit_code = 2


class Taken(CloudError):
    """The name is taken."""


class NotFound(CloudError):
    """Nothing has this name."""


class Invalid(CloudError):
    """The cloud does not support the request, or not in the machine's state."""

    exit_code = 2


class Unreachable(CloudError):
    """The cloud did not answer, failed, or asks to slow down; whether it acted is unknown."""


class Changed(CloudError):
    """Another process wrote the object meanwhile: read it again."""
