"""Conditional reads and writes of objects in Cloud Storage, for the document of a fleet."""

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from tpuswarm.cloud.errors import Changed, CloudError, NotFound, Unreachable
from tpuswarm.cloud.google.access import RETRY_WINDOW_S, Access
from tpuswarm.cloud.protocol import Stored
from tpuswarm.train.storage.bucket import Bucket, BucketFailed
from tpuswarm.train.storage.connection import Endpoint

STORAGE_HOST = "storage.googleapis.com"
T = TypeVar("T")


def bucket_url(access: Access, name: str) -> str:
    return access.url(STORAGE_HOST, f"storage/v1/b/{name}")


class GoogleBucket:
    """Implements `Bucket`."""

    def __init__(self, access: Access, name: str):
        self._access = access
        self.name = name

    @cached_property
    def _bucket(self) -> Bucket:
        local = self._access.endpoints
        return Bucket(f"gs://{self.name}", Endpoint(local.http if local else "", self._access.credentials))

    def read(self, path: str) -> Stored | None:
        """Raise NotFound if there is no such bucket."""
        doing = f"reading gs://{self.name}/{path}"
        versioned = self._call(doing, lambda: self._bucket.read_versioned(path, RETRY_WINDOW_S))
        if versioned is not None:
            return Stored(versioned.data, versioned.generation)
        try:
            self._access.get(doing, bucket_url(self._access, self.name))
        except NotFound:
            raise NotFound(f"{doing}: there is no bucket {self.name}; `tpuswarm init` creates one") from None
        return None

    def write(self, path: str, data: bytes, generation: int) -> int:
        doing = f"writing gs://{self.name}/{path}"
        written = self._call(doing, lambda: self._bucket.swap(path, data, generation, RETRY_WINDOW_S))
        if written is None:
            stored = self.read(path)
            if stored is None or stored.data != data:
                raise Changed(f"{doing}: somebody else wrote it meanwhile")
            written = stored.generation  # this write, whose first answer was lost
        return written

    def _call(self, doing: str, call: Callable[[], T]) -> T:
        def call_once() -> T:
            try:
                return call()
            except BucketFailed as error:
                raise error.__cause__ or error from None

        try:
            return self._access.call_once(doing, call_once)
        except CloudError:
            raise
        except Exception as error:
            raise Unreachable(f"{doing}: {error}") from error
