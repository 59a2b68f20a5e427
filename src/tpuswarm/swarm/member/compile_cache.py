"""Share compiled programs among the members of a machine, and among the machines of a run through its bucket.

JAX's own cache can lie in a bucket, but then reads it for each small program. Here a member fetches all missing entries
at once, and a thread uploads new ones. Without the bucket the member compiles as usual.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

import jax

from tpuswarm.swarm.engines.variables import COMPILED
from tpuswarm.train.process.computer import computer_id
from tpuswarm.train.storage.bucket import Bucket

FETCH_TIMEOUT_S = 30.0
UPLOAD_TIMES_S = (0.0, 10.0, 60.0, 600.0)
"""Times after compilation at which new entries are uploaded: the first cycles compile more programs."""
PATTERN = "*-cache"
"""Names of JAX's entries: the digest of everything that determines the compiled program."""
FIRST_TIMEOUT_S = 600.0
"""A member that has waited this long for the first one of its machine compiles beside it."""


@contextmanager
def after_first(name: str) -> Iterator[None]:
    """Compile first, or wait for the process of this machine that does; JAX's cache then has the program.

    Those that waited go on at the same time, in case the cache does not help them. Without a cache on a local disk, and
    on several hosts, of which only one writes the cache, do not wait.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or "://" in folder or jax.process_count() > 1:
        yield
        return
    with ExitStack() as ends:
        with suppress(OSError):  # a folder that cannot be written, or a disk without locks
            Path(folder).mkdir(parents=True, exist_ok=True)
            _lock(ends.enter_context((Path(folder) / f"{name}-{computer_id()}.lock").open("a")))
        yield


def _lock(file: TextIO) -> None:
    end, kind = time.monotonic() + FIRST_TIMEOUT_S, fcntl.LOCK_EX
    while time.monotonic() < end:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            kind = fcntl.LOCK_SH
            time.sleep(0.1)


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
