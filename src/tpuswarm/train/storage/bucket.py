"""A client of Google Cloud Storage: every request has a time limit, every transfer is checked.

Built on google-cloud-storage, which verifies CRC32C both ways and recovers resumable uploads.
"""

import email.utils
import json
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.storage.connection import TIMEOUT_S, Endpoint, connect, default_endpoint, is_transient
from tpuswarm.train.storage.credentials import UsedCredentials, used_credentials

RETRY_FOR_S = 600.0
"""How long a request is repeated while the bucket does not answer: a run outlives an outage."""
FIRST_RETRY_FOR_S = 10.0
"""How long before the first answer of a bucket, whose address may be wrong."""
MAX_RESTARTS = 20
"""How often a transfer that got an answer may start again before RETRY_FOR_S counts."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 8.0
CHUNK_BYTES, CHUNK_FOR_S = 16 * 2**20, 60.0
"""Larger files are uploaded in chunks of this size; how long a chunk is repeated before the upload restarts."""
WAY_OUT = "start the same command again"

_ONCE: dict[str, Any] = {"timeout": TIMEOUT_S, "retry": None}

Answer = TypeVar("Answer")
Content = bytes | Sequence[bytes | memoryview]
"""The bytes of an object, in one piece or in several."""


class BucketFailed(RunFailed):
    """The bucket does not answer, or refuses."""


class Unreachable(BucketFailed):
    """The bucket does not answer; it may later."""


class Listed(NamedTuple):
    """An object in a listing."""

    size: int
    written: float
    """Unix seconds by the bucket's clock."""
    generation: int = 0
    crc32c: str = ""


class Versioned(NamedTuple):
    """An object's content with its generation, which each write changes."""

    data: bytes
    generation: int


class Bucket:
    """The objects under one gs:// URL.

    Methods raise FileNotFoundError for an absent object and BucketFailed for everything else that goes wrong. They may
    be called from several threads.
    """

    def __init__(self, url: str, endpoint: Endpoint | None = None):
        """Raise InputError if the library is not installed; sends nothing. endpoint: default the environment's."""
        self.url = url.rstrip("/")
        name, _, self._prefix = self.url.partition("://")[2].partition("/")
        try:
            endpoint = endpoint or default_endpoint()
            self._client, self._answers, self._progress = connect(endpoint)
        except ImportError as error:
            raise InputError(f"{url} needs one more library: pip install 'tpuswarm[gcloud]'") from error
        self._used = UsedCredentials() if endpoint.address else used_credentials()
        self._host = urlsplit(self._client.api_endpoint).hostname
        self._bucket = self._client.bucket(name)
        self._has_answered = False
        self.gave_up = False
        """Set to stop repeating requests, so that those under way end soon."""

    @property
    def progress(self) -> int:
        """A number that grows while requests succeed and their bodies are sent."""
        return self._progress.count

    def create(self, name: str, data: Content) -> bool:
        """Write a new object; return False if one of that name exists."""
        return self._write(name, data, 0) is not None

    def swap(self, name: str, data: bytes, generation: int, retry_for_s: float | None = None) -> int | None:
        """Replace an object of this generation (0: absent); return the new one, None if it has another.

        A lost answer that was repeated gives None too: read the object to see.
        """
        return self._write(name, data, generation, retry_for_s)

    def put(self, name: str, data: Content) -> None:
        """Write an object, in the place of one that may exist."""
        self._write(name, data, None)

    def put_file(self, name: str, path: Path) -> int:
        """Write an object from a file; return its size in bytes."""
        from google.api_core.exceptions import GoogleAPICallError
        from google.api_core.retry import Retry

        repeated = Retry(predicate=self._may_repeat, initial=MIN_PAUSE_S, maximum=MAX_PAUSE_S, timeout=CHUNK_FOR_S)

        def upload() -> int:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                blob = self._blob(name)
                blob.chunk_size = CHUNK_BYTES if size > CHUNK_BYTES else None
                how = _ONCE | {"retry": repeated if blob.chunk_size else None}
                try:
                    blob.upload_from_file(file, size=size, checksum="crc32c", **how)
                except ValueError as error:  # the library cannot go on after a chunk that was not kept
                    raise ConnectionError(f"the upload of {name} was lost") from error
                except GoogleAPICallError as error:
                    if error.code not in (404, 410):
                        raise
                    self._list("", most=1)  # raises if the bucket is gone; otherwise only the session was lost
                    raise ConnectionError(f"the upload of {name} was lost") from error
            if _size(blob) != size:
                raise ConnectionError(f"{_size(blob)} of {size} bytes were stored")
            return size

        return self._request(f"writing {name}", upload)

    def read(self, name: str) -> bytes:
        """Return the content of an object."""
        blob = self._blob(name)
        return self._request(f"reading {name}", lambda: bytes(blob.download_as_bytes(checksum="crc32c", **_ONCE)))

    def read_versioned(self, name: str, retry_for_s: float | None = None) -> Versioned | None:
        """Return an object with its generation; None if there is none."""

        def download() -> Versioned:
            blob = self._blob(name)
            data = blob.download_as_bytes(checksum="crc32c", **_ONCE)
            return Versioned(data, int(blob.generation))

        try:
            return self._request(f"reading {name}", download, retry_for_s)
        except FileNotFoundError:
            return None

    def read_if_there(self, name: str) -> bytes | None:
        """Return the content of an object; None if there is none."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def age_s(self, name: str) -> float:
        """Return how many seconds ago an object was written, by the bucket's clock alone."""

        def request_age() -> float:
            blob = self._blob(name)
            blob.reload(**_ONCE)
            date = email.utils.parsedate_tz(self._answers.last_headers["Date"])
            return max(0.0, email.utils.mktime_tz(date) - blob.updated.timestamp()) if date else 0.0

        return self._request(f"reading {name}", request_age)

    def read_range(self, name: str, generation: int, start: int, end: int) -> bytes:
        """Return a range of an object of this generation, without checking it."""
        blob = self._bucket.blob(self._full(name), generation=generation)
        how: dict[str, Any] = {"start": start, "end": end - 1, "raw_download": True, "checksum": None}
        return self._request(f"reading {name}", lambda: bytes(blob.download_as_bytes(**how, **_ONCE)))

    def fetch(self, name: str, to: Path) -> None:
        """Download an object to a file, whole or not at all."""
        to.parent.mkdir(parents=True, exist_ok=True)
        part = to.with_name(f".{to.name}.{secrets.token_hex(8)}.part")

        def download() -> None:
            with part.open("wb") as file:
                self._blob(name).download_to_file(file, checksum="crc32c", **_ONCE)

        try:
            self._request(f"reading {name}", download)
            part.replace(to)
        finally:
            part.unlink(missing_ok=True)

    def exists(self, name: str) -> bool:
        """Return whether there is an object of that name."""
        return self._request(f"looking for {name}", lambda: bool(self._blob(name).exists(**_ONCE)))

    def listed(self, prefix: str) -> dict[str, Listed]:
        """Return all objects whose names begin with `prefix`, by name."""
        return self._request(f"listing {prefix or 'it'}", lambda: self._list(prefix))

    def delete(self, name: str, generation: int | None = None) -> bool:
        """Delete an object, if there is one; return False if it has another generation than the given one."""
        from google.api_core.exceptions import PreconditionFailed

        def delete() -> bool:
            try:
                self._blob(name).delete(if_generation_match=generation, **_ONCE)
            except PreconditionFailed:
                return False
            return True

        try:
            return self._request(f"deleting {name}", delete)
        except FileNotFoundError:
            return True

    def _write(self, name: str, data: Content, generation: int | None, retry_for_s: float | None = None) -> int | None:
        from google.api_core.exceptions import PreconditionFailed

        content = data if isinstance(data, bytes) else b"".join(data)

        def upload() -> int | None:
            blob = self._blob(name)
            try:
                blob.upload_from_string(content, if_generation_match=generation, checksum="crc32c", **_ONCE)
            except PreconditionFailed:
                return None
            return int(blob.generation)

        return self._request(f"writing {name}", upload, retry_for_s)

    def _list(self, prefix: str, most: int | None = None) -> dict[str, Listed]:
        fields = "items(name,size,updated,generation,crc32c),nextPageToken"
        found = self._client.list_blobs(
            self._bucket, prefix=self._full(prefix), fields=fields, max_results=most, **_ONCE
        )
        blobs = [blob for blob in found if not blob.name.endswith("/")]  # the console makes those, as empty folders
        cut = len(self._full(""))
        return {
            blob.name[cut:]: Listed(_size(blob), blob.updated.timestamp(), blob.generation, blob.crc32c)
            for blob in blobs
        }

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _request(self, doing: str, call: Callable[[], Answer], retry_for_s: float | None = None) -> Answer:
        """Make a request, and repeat it while the bucket does not answer."""
        from google.api_core.exceptions import NotFound

        usual = RETRY_FOR_S if self._has_answered else min(FIRST_RETRY_FOR_S, RETRY_FOR_S)
        patience, pause = usual if retry_for_s is None else retry_for_s, MIN_PAUSE_S
        failing_since, restarts = time.monotonic(), 0
        while True:
            before = self._answers.successes
            try:
                answer = call()
            except NotFound as error:
                self._has_answered = True
                if doing.startswith(("reading", "deleting")):
                    raise FileNotFoundError(doing) from error
                raise BucketFailed(f"{self.url}: there is no such bucket; create it, or use another one") from error
            except Exception as error:
                if isinstance(error, OSError) and error.errno is not None and not is_transient(error):
                    raise  # the local file failed
                now = time.monotonic()
                if self._answers.successes > before and restarts < MAX_RESTARTS:
                    failing_since, restarts = now, restarts + 1  # a long transfer may fail more than once
                if not self._may_repeat(error) or now - failing_since > patience:
                    raise self._failed(doing, error) from error
            else:
                self._has_answered = True
                return answer
            time.sleep(pause * random.random())
            pause = min(2 * pause, MAX_PAUSE_S)

    def _may_repeat(self, error: BaseException) -> bool:
        may_pass = is_transient(error)
        self._progress.is_failing |= may_pass
        return may_pass and not self.gave_up

    def _failed(self, doing: str, error: BaseException) -> BucketFailed:
        import requests
        from google.auth.exceptions import GoogleAuthError

        error = getattr(error, "cause", None) or error  # a chunk's last error
        text = _server_message(str(getattr(error, "message", "") or error)) or type(error).__name__
        if is_transient(error):
            text = f"{self._host} does not answer" if isinstance(error, requests.RequestException) else text
            return Unreachable(f"{self.url}: {doing} failed: {text}; {WAY_OUT}")
        code, used = getattr(error, "code", None), self._used
        if isinstance(error, GoogleAuthError) or code == 401:
            return BucketFailed(f"{self.url}: not signed in to Google Cloud ({text}){used.note}; {used.remedy}")
        return BucketFailed(f"{self.url}: {doing} failed: {text}{used.note if code == 403 else ''}")


def _size(blob: Any) -> int:
    """Return the bytes of an object; some servers leave out a size of 0."""
    return int(blob.size or 0)


def _server_message(text: str) -> str:
    text = re.sub(r"^[A-Z]+ https?://\S+: ", "", " ".join(text.split()))
    found = re.search(r'"message": ?("(?:[^"\\]|\\.)*")', text)
    return str(json.loads(found[1]) if found else text).rstrip(".")[:300]
