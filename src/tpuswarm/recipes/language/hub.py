"""Find files of published models: in a folder, or on a Hugging Face hub (`HF_ENDPOINT`, `HF_HUB_OFFLINE`)."""

import asyncio
import errno
import math
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, RunFailed, TpuswarmError

PREFIX = "hf:"
RELEASED = {
    "gpt2": "openai-community/gpt2",
    "117m": "openai-community/gpt2",
    "124m": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "345m": "openai-community/gpt2-medium",
    "355m": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "774m": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "1558m": "openai-community/gpt2-xl",
}
"""OpenAI's released models by name; it labels those of 124 and 355 million parameters 117M and 345M."""
CONNECT_TIMEOUT_S, RECHECK_INTERVAL_S = 4.0, 10.0
_failures: dict[str, tuple[float, str]] = {}
"""Time and reason of the last failure to connect, by endpoint."""
REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class Published:
    """The files of one model: in `folder`, or of one commit of a hub's repository. name: as the user wrote it."""

    name: str
    folder: Path | None
    repository: str = ""
    commit: str = ""

    def find(self, file: str) -> Path | None:
        """Return a file, downloaded if it is not in the cache; None if the model does not have it."""
        if self.folder is not None:
            path = self.folder / file
            return path if path.is_file() else None
        return _fetch(self.repository, file, self.commit)

    def get(self, file: str, what: str) -> Path:
        """Return a file. Raises InputError if the model does not have it."""
        path = self.find(file)
        if path is None:
            raise InputError(f"{self.name} has no {file}, so no {what}")
        return path


def is_place(name: str) -> bool:
    """Whether a name means a published model: `hf:…`, or one of OpenAI's."""
    return name.startswith(PREFIX) or name.lower() in RELEASED


def open_published(name: str) -> Published:
    """Find the model `name`: one of RELEASED, `hf:ORG/NAME` or `hf:DIR`.

    Raises InputError for an invalid name, and for a model that is missing or not open to this user. Raises RunFailed if
    the hub does not answer and the files are not in its cache.
    """
    repository = RELEASED.get(name.lower())
    if repository is None:
        if not name.startswith(PREFIX):
            raise InputError(
                f"{name} is neither a run nor a published model (hf:ORG/NAME, hf:DIR or a released GPT-2); "
                f"{did_you_mean(name, RELEASED)}"
            )
        repository = name.removeprefix(PREFIX)
        folder = Path(repository).expanduser()
        if folder.is_dir():
            return Published(name, folder.absolute())
        if not REPOSITORY.fullmatch(repository):
            raise InputError(f"there is no folder {folder}, and {repository!r} is not the ORG/NAME of a hub model")
    try:
        config = _fetch(repository, "config.json", "main") or _fetch(repository, "adapter_config.json", "main")
    except TpuswarmError as error:
        if name.startswith(PREFIX):  # a mistyped folder looks like the name of a model
            raise type(error)(f"there is no folder {repository}, and {error}") from error
        raise
    if config is None:
        raise InputError(f"{name} has no config.json, so it is not a model that can be read")
    return Published(name, None, repository, config.parent.name)


def _fetch(repository: str, file: str, revision: str) -> Path | None:
    """Return a file in the hub's cache, verified; None if the repository does not have it.

    An interrupted transfer is resumed only within this call: huggingface_hub keeps no partial file.
    """
    from huggingface_hub import _CACHED_NO_EXIST, constants, errors, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.utils.logging import disable_propagation

    disable_propagation()  # the library prints its warnings itself; other handlers would repeat them
    where = f"{repository} at {constants.ENDPOINT}"
    connection_error = "" if constants.is_offline_mode() else _connection_error(constants.ENDPOINT)
    try:
        return Path(hf_hub_download(repository, file, revision=revision, local_files_only=bool(connection_error)))
    except errors.RemoteEntryNotFoundError:
        return None
    except errors.LocalEntryNotFoundError as error:
        if try_to_load_from_cache(repository, file, revision=revision) is _CACHED_NO_EXIST:
            return None  # the hub's earlier answer
        if constants.is_offline_mode():
            raise InputError(
                f"{file} of {where} is not in the cache {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set; unset it "
                "once, or put the model's files into a folder and use hf:DIR"
            ) from error
        reason = ConnectionError(connection_error) if connection_error else error.__cause__ or error
        raise RunFailed(_not_fetched(file, where, reason)) from error
    except errors.GatedRepoError as error:
        raise InputError(f"{where} is gated: request access there, then set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(f"there is no model {where}, or it is private and HF_TOKEN is not set") from error
    except errors.HFValidationError as error:
        raise InputError(f"{repository} is not a valid ORG/NAME: {error}") from error
    except Exception as error:  # a broken transfer raises errors of the HTTP library
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise RunFailed(
                f"the disk of {constants.HF_HUB_CACHE} is full: make room for {file} of {repository}, or set HF_HOME"
            ) from error
        raise RunFailed(_not_fetched(file, where, error)) from error


def _connection_error(endpoint: str) -> str:
    """Return why the hub, or the proxy to it, takes no connection; empty if it does.

    huggingface_hub would retry for 25 s, also for files in its cache. A failure counts for the next files too.
    """
    failed_at, error = _failures.get(endpoint, (-math.inf, ""))
    if time.monotonic() - failed_at < RECHECK_INTERVAL_S:
        return error
    target = urlsplit(endpoint)
    proxies = {} if proxy_bypass(target.hostname or "") else getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if proxy:
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = target.hostname or "", target.port or (443 if target.scheme == "https" else 80)
    errors: list[str] = []
    # A name server that does not answer takes half a minute, and nothing can interrupt the library that waits for it.
    thread = threading.Thread(target=lambda: errors.append(_connect(address)), daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S)
    reason = errors[0] if errors else f"no answer in {CONNECT_TIMEOUT_S:g} s"
    error = f"no connection to {address[0]}: {reason}" if reason else ""
    if error:
        _failures[endpoint] = time.monotonic(), error
    return error


def _connect(address: tuple[str, int]) -> str:
    """Return why none of a host's addresses takes a connection; empty if one does."""
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        attempts = _connect_to_any({str(sockaddr[0]) for *_, sockaddr in found}, port)
        return asyncio.run(asyncio.wait_for(attempts, CONNECT_TIMEOUT_S))
    except OSError as error:
        return error.strerror or str(error) or "no answer"


async def _connect_to_any(addresses: set[str], port: int) -> str:
    """Try all addresses at once, since those of a broken IPv6 never answer."""

    async def connect(address: str) -> None:
        _, writer = await asyncio.open_connection(address, port)
        writer.close()

    reason = ""
    for attempt in asyncio.as_completed(map(connect, addresses)):
        try:
            await attempt
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
        else:
            return ""
    return reason


def _not_fetched(file: str, where: str, error: BaseException) -> str:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"{file} of {where} could not be downloaded ({reason[0][:200]}); try again, set HF_ENDPOINT to another hub, or "
        "put the files into a folder and use hf:DIR"
    )


def absolute_place(place: str) -> str:
    """Return a published model's name with an absolute path."""
    folder = Path(place.removeprefix(PREFIX)).expanduser()
    return f"{PREFIX}{folder.resolve()}" if place.startswith(PREFIX) and folder.is_dir() else place
