"""What an apply leaves behind so that it can be undone: the values that settings had before, and what was applied."""

from pydantic import ValidationError

from tpuswarm.config.toml_file import StrictTable
from tpuswarm.errors import InputError


class KeptSetting(StrictTable):
    """A setting that is not as it was."""

    path: str
    old: str | None
    """What the file held before, whole; None if there was no such file."""
    new: str


class Record(StrictTable):
    """The content of `machine.RECORD`. It is written before anything is changed, and again after."""

    file: str
    """ROUTER.toml, absolute."""
    tune: bool
    persist: bool
    ruleset: str
    """The text that was given to nft."""
    ports: tuple[str, ...] = ()
    """All that led somewhere since the last remove, as ranges: connections through them may still be open."""
    rest: str | None
    """`Listing.rest` right after that; None until it is known that the kernel took the ruleset."""
    settings: tuple[KeptSetting, ...]


def parse_record(path: str, text: str) -> Record:
    """Raises InputError, naming `path`, for a text that is no record."""
    try:
        return Record.model_validate_json(text)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise InputError(
            f"{path} is damaged ({said}): restore by hand the settings it still names, then delete it and apply again"
        ) from None
