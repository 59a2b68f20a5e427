"""The errors a user sees: one sentence with the numbers involved and the way out."""


class TpuswarmError(Exception):
    """Base of all errors meant for a user; `exit_code` is what the command line ends with."""

    exit_code = 1


class InputError(TpuswarmError):
    """What was asked cannot be done as asked: a wrong option, file, shape or combination."""

    exit_code = 2


class NoSuchSplit(InputError):
    """A recipe has no data of this name: without `validation` a run trains all the same, and evaluates nothing."""


class UnknownFormat(InputError):
    """A file that another version of tpuswarm wrote, and this one cannot read."""

    def __init__(self, where: str, found: object, known: object):
        from importlib.metadata import version

        unknown = f"{where}: format {found} is unknown to tpuswarm {version('tpuswarm')}, which reads format {known}"
        super().__init__(f"{unknown}; use the version that wrote it, or a newer one")


class RunFailed(TpuswarmError):
    """A valid run failed."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """Of what an error of a library says; of one without words its name."""
    return message_of(error).strip().partition("\n")[0] or type(error).__name__


def message_of(error: BaseException) -> str:
    """Return an error's message; empty if its `__str__` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # of a user's class
        return ""
