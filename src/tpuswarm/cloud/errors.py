"""What may go wrong with a cloud, told apart by what one does about it."""

from tpuswarm.errors import TpuswarmError


class CloudError(TpuswarmError):
    """The cloud refused, or could not be asked; its sentence is in the message."""


class NoCapacity(CloudError):
    """The zone has no such TPU at the moment: try again, or elsewhere."""


class NoQuota(CloudError):
    """The project may not have so many, or not there: trying again does not help."""

    def __init__(self, message: str, limit: str | None = None):
        """`limit`: the name of the quota, where the cloud says which."""
        super().__init__(message)
        self.limit = limit


class Denied(CloudError):
    """Who asks may not do that."""

    exit_code = 2

    def __init__(self, message: str, permission: str | None = None):
        """`permission`: what is missing, where the cloud says it (tpu.nodes.create)."""
        super().__init__(message)
        self.permission = permission


class NotSignedIn(CloudError):
    """There are no credentials, or they have expired."""

    exit_code = 2


class Taken(CloudError):
    """There is something of that name already."""


class NotFound(CloudError):
    """There is nothing of that name."""


class Invalid(CloudError):
    """The cloud does not take what was asked, or not in the state that the machine is in."""

    exit_code = 2


class Unreachable(CloudError):
    """The cloud did not answer, failed itself or asks to slow down: whether it did what was asked is not known."""


class Changed(CloudError):
    """Somebody else wrote the object meanwhile: read it again."""
