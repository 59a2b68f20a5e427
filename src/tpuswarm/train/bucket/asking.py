"""Who has a run in a bucket, and what others ask of them there; tended.py hears it."""

import json
from pathlib import Path

from tpuswarm.train.bucket import lease
from tpuswarm.train.bucket.mirror import HOLDER, Mirror

ASKED = "asked/"
STOP, REQUEST = "stop", "profile-request.json"
"""What can be asked: to stop, and by this file for a trace (train/look/profile.py)."""


def elsewhere(folder: Path) -> lease.Holder | None:
    """Who has the run in its bucket, as `bring` has seen it; None: nobody, or a process of this disk's run."""
    if not (folder / HOLDER).is_file():  # whatever else lies there: a file, a circle of links
        return None
    try:
        found = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    age = found.pop("age")
    holder = lease.Holder(**found)
    return None if holder.ended or holder.gone or age > 3 * lease.TERM else holder


def ask_to_stop(folder: Path) -> lease.Holder | None:
    """Leave word for whoever has the run that it is to stop; who that is."""
    return ask(folder, STOP, "")


def ask(folder: Path, name: str, text: str) -> lease.Holder | None:
    """Leave word for whoever has the run in its bucket; who that is.

    name: STOP, or REQUEST, the file which it is to find in the run's folder.
    """
    holder = elsewhere(folder)
    if holder:
        Mirror(folder).bucket.put(f"{ASKED}{holder.owner}/{name}", text.encode())
    return holder
