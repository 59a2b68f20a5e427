"""Share compiled programs among the machines of a run, through a folder of its bucket.

JAX's own cache can lie in a bucket, but then reads it for each small program. Here a member fetches all missing entries
at once, and a thread uploads new ones. Without the bucket the member compiles as usual.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from tpuswarm.swarm.engines.variables import COMPILED
from tpuswarm.train.storage.bucket import Bucket

FETCH_TIMEOUT_S = 30.0
UPLOAD_TIMES_S = (0.0, 10.0, 60.0, 600.0)
"""Times after compilation at which new entries are uploaded: the first cycles compile more programs."""
PATTERN = "*-cache"
"""Names of JAX's entries: the digest of everything that determines the compiled program."""


def fetch(say: Callable[[str], None]) -> None:
    """Fetch what others have compiled, if this machine has a cache in a bucket."""
    url, folder = os.environ.get(COMPILED), jax.config.values["jax_compilation_cache_dir"]
    if not url or not folder:
        return
    found: list[str] = []

    def fetch_entries() -> None:
        try:
            bucket = Bucket(url)
            for name in bucket.listed(""):
                if not (Path(folder) / name).exists():
                    bucket.fetch(name, Path(folder) / name)
                    found.append(name)
        except Exception as error:  # noqa: BLE001  # each library has its own errors; the member compiles instead
            say(f"could not fetch compiled programs: {type(error).__name__}: {error}")

    thread = threading.Thread(target=fetch_entries, name="compiled", daemon=True)
    thread.start()
    thread.join(FETCH_TIMEOUT_S)
    if found:
        say(f"fetched {len(found)} compiled programs")


def upload(say: Callable[[str], None], times: tuple[float, ...] = UPLOAD_TIMES_S) -> None:
    """Upload new entries in a thread."""
    url, folder = os.environ.get(COMPILED), jax.config.values["jax_compilation_cache_dir"]
    if not url or not folder:
        return

    def upload_entries() -> None:
        began = time.monotonic()
        try:
            bucket = Bucket(url)
            for seconds in times:
                time.sleep(max(0.0, began + seconds - time.monotonic()))
                known = bucket.listed("")
                for path in sorted(Path(folder).glob(PATTERN)):
                    if path.name not in known:
                        bucket.create(path.name, path.read_bytes())
        except Exception as error:  # noqa: BLE001  # each library has its own errors
            say(f"could not share compiled programs: {type(error).__name__}: {error}")

    threading.Thread(target=upload_entries, name="compiled", daemon=True).start()
