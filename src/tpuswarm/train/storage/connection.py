"""Connect to Cloud Storage: credentials, time limits, and the progress of uploads."""

import functools
import io
import os
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tpuswarm.errors import InputError
from tpuswarm.train.storage.credentials import KEY_VARIABLE, used_credentials

TIMEOUT_S = 5.0, 10.0
"""Time limits of one request: to connect, and between two reads of its answer."""
RETRIED_CODES = 308, 408, 429, 500, 502, 503, 504
"""Answers after which a request is repeated; 308: a chunk of an upload was not kept."""
MAX_CONNECTIONS = 16
BLOCK_BYTES = 2**16
LOCAL_TOKEN = "STORAGE_EMULATOR_TOKEN"
"""The variable with the token of a local cloud at STORAGE_EMULATOR_HOST."""


class Endpoint(NamedTuple):
    """A server of buckets and its credentials."""

    address: str = ""
    """Empty: Google's."""
    credentials: Any = None
    """Without them: the environment's."""


_local_cloud: Endpoint | None = None


def use_local_cloud(endpoint: Endpoint) -> None:
    """Use the buckets of a local cloud in this process."""
    global _local_cloud
    _local_cloud = endpoint


def default_endpoint() -> Endpoint:
    """Return the endpoint that this process uses."""
    return _local_cloud or Endpoint(os.environ.get("STORAGE_EMULATOR_HOST", ""))


class Answers(threading.local):
    """The answers that one thread has got."""

    successes = 0
    last_headers: Mapping[str, str] = MappingProxyType({})


class Progress:
    """Counts what succeeds; bytes of requests that are repeated do not count."""

    def __init__(self) -> None:
        self.count, self.is_failing = 0, False

    def add(self, number: int) -> None:
        """Count progress."""
        self.count += 0 if self.is_failing else number


class _Body(io.BytesIO):
    """A request body that is sent in blocks, so that the time limit applies to each block."""

    def __init__(self, data: bytes, progress: Progress):
        super().__init__(data)
        self._progress = progress

    def __len__(self) -> int:
        return self.getbuffer().nbytes

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._progress.add(len(data))
        return data


@functools.lru_cache(maxsize=4)
def connect(endpoint: Endpoint) -> tuple[Any, Answers, Progress]:
    """Return a client, the answers of each thread, and the progress of all."""
    from google.auth.transport.requests import AuthorizedSession
    from google.cloud.storage import Client
    from requests.adapters import HTTPAdapter

    answers, progress = Answers(), Progress()
    credentials = endpoint.credentials or _credentials(bool(endpoint.address))
    session: Any = AuthorizedSession(credentials, refresh_timeout=int(TIMEOUT_S[1]))  # type: ignore[no-untyped-call]
    send = session.request

    def send_in_blocks(method: str, url: str, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, bytes) and len(data) > BLOCK_BYTES:
            data = _Body(data, progress)
        elif isinstance(data, _Body):  # again, with other credentials
            data.seek(0)
        return send(method, url, data, *args, **kwargs)

    session.request = send_in_blocks
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=MAX_CONNECTIONS))

    def note(answer: Any, *_: Any, **__: Any) -> None:
        answers.last_headers = answer.headers
        if answer.status_code < 400:
            answers.successes += 1
            progress.is_failing = False
            progress.add(1)

    session.hooks["response"].append(note)
    options = {"api_endpoint": endpoint.address} if endpoint.address else None
    client = Client(project="none", credentials=credentials, _http=session, client_options=options)
    client._bucket_metadata_cache = None  # it would request the bucket's metadata in the background after each 404
    return client, answers, progress


def _credentials(is_local: bool) -> Any:
    """Return the credentials of the environment; who has none may read public buckets."""
    from google.auth import default
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError
    from google.oauth2.credentials import Credentials

    if is_local and (token := os.environ.get(LOCAL_TOKEN)):
        return Credentials(token)  # type: ignore[no-untyped-call]
    if not is_local or "GCE_METADATA_HOST" in os.environ:  # a machine of the local cloud has a metadata server
        try:
            return default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])[0]
        except DefaultCredentialsError as error:
            if os.environ.get(KEY_VARIABLE):
                used = used_credentials()
                raise InputError(f"not signed in to Google Cloud ({error}){used.note}; {used.remedy}") from error
    return AnonymousCredentials()  # type: ignore[no-untyped-call]


def is_transient(error: BaseException) -> bool:
    """Return whether a request may succeed later: the network is cut, or the server is busy."""
    import requests
    import urllib3
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

    if isinstance(error, RetryError):
        return error.cause is not None and is_transient(error.cause)
    if isinstance(error, GoogleAPICallError):
        return error.code in RETRIED_CODES
    if isinstance(error, InvalidResponse):
        return error.response.status_code in RETRIED_CODES
    if isinstance(error, GoogleAuthError) and any(isinstance(cause, TransportError) for cause in error.args):
        return True  # the server of credentials could not be reached
    lost = requests.RequestException, urllib3.exceptions.HTTPError, TransportError, DataCorruption
    return isinstance(error, (*lost, ConnectionError, TimeoutError))
