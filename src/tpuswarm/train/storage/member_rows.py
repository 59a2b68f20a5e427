"""Give each member of a swarm its own file of the rows of a run."""

import json
from contextlib import suppress
from pathlib import Path

from tpuswarm.train.storage.folders import ROWS


def split_members(folder: Path, start: int) -> None:
    """Append the new rows of the run to the file of each member. start: the byte at which they begin."""
    with (folder / ROWS).open("rb") as file:
        file.seek(max(0, start - 1))
        new = file.read()
    if start and not new.startswith(b"\n"):  # a part ended within a line
        split_members(folder, 0)
        return
    rows: dict[str, list[bytes]] = {}
    for line in new.splitlines(keepends=True):
        with suppress(ValueError):
            if member := json.loads(line).get("member"):
                rows.setdefault(str(member), []).append(line)
    for member, lines in rows.items():
        own = folder / "members" / member / ROWS
        own.parent.mkdir(parents=True, exist_ok=True)
        with own.open("ab" if start else "wb") as file:
            file.writelines(lines)
