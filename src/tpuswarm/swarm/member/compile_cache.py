"""What one machine of a fleet has compiled, for all that come later: a folder of the run's bucket.

JAX's own cache can lie in a bucket, but asks it for each small program; here a member brings all that it lacks at once,
and sends what is new from a thread of its own. Without the bucket it compiles, as it would have.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from tpuswarm.swarm.engines.variables import COMPILED
from tpuswarm.train.storage.bucket import Bucket

PATIENCE = 30.0
"""Seconds for which what others have compiled is waited for."""
SENT_AFTER = (0.0, 10.0, 60.0, 600.0)
"""Seconds after a member's program is compiled: what its first cycles still compile comes later."""
PATTERN = "*-cache"
"""Names of JAX's entries: the digest of all that decides what comes of a compilation."""


def bring(say: Callable[[str], None]) -> None:
    """Have what others have compiled; nothing where this machine was not told of them."""
    url, folder = os.environ.get(COMPILED), jax.config.values["jax_compilation_cache_dir"]
    if not url or not folder:
        return
    found: list[str] = []

    def fetch() -> None:
        try:
            bucket = Bucket(url)
            for name in bucket.listed(""):
                if not (Path(folder) / name).exists():
                    bucket.fetch(name, Path(folder) / name)
                    found.append(name)
        except Exception as error:  # noqa: BLE001  # each library has its own: it compiles without them
            say(f"what others have compiled could not be had: {type(error).__name__}: {error}")

    thread = threading.Thread(target=fetch, name="compiled", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if found:
        say(f"programs that others have compiled: {len(found)}")


def send(say: Callable[[str], None], pauses: tuple[float, ...] = SENT_AFTER) -> None:
    """Let others have what is compiled here, from a thread of its own."""
    url, folder = os.environ.get(COMPILED), jax.config.values["jax_compilation_cache_dir"]
    if not url or not folder:
        return

    def give() -> None:
        began = time.monotonic()
        try:
            bucket = Bucket(url)
            for pause in pauses:
                time.sleep(max(0.0, began + pause - time.monotonic()))
                there = bucket.listed("")
                for path in sorted(Path(folder).glob(PATTERN)):
                    if path.name not in there:
                        bucket.create(path.name, path.read_bytes())
        except Exception as error:  # noqa: BLE001  # as above
            say(f"what is compiled here could not be shared: {type(error).__name__}: {error}")

    threading.Thread(target=give, name="compiled", daemon=True).start()
