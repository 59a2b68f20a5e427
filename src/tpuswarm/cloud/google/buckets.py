"""A bucket of Cloud Storage whose objects are written only if nobody else wrote them meanwhile."""

import contextlib
from urllib.parse import quote

from tpuswarm.cloud.errors import Changed, NotFound
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.protocol import Stored

HOST = "storage.googleapis.com"


def bucket_url(access: Access, name: str) -> str:
    """Of a bucket in the JSON API."""
    return access.url(HOST, f"storage/v1/b/{name}")


class GoogleBucket:
    """Implements `Bucket`."""

    def __init__(self, access: Access, name: str):
        self._access = access
        self.name = name

    def read(self, path: str) -> Stored | None:
        """See Bucket. Raises NotFound where there is no such bucket."""
        doing, access = f"reading gs://{self.name}/{path}", self._access
        try:
            answer = access.ask(doing, lambda: access.rest("GET", self._object(path), {"alt": "media"}))
        except NotFound:  # the object, or the bucket: Google's answers differ in words alone
            try:
                access.get(doing, bucket_url(access, self.name))
            except NotFound:
                raise NotFound(f"{doing}: there is no bucket {self.name}; `tpuswarm init` makes one") from None
            return None
        return Stored(answer.content, int(answer.headers["X-Goog-Generation"]))

    def write(self, path: str, data: bytes, generation: int) -> int:
        """See Bucket."""
        access = self._access
        url = access.url(HOST, f"upload/storage/v1/b/{self.name}/o")
        query = {"uploadType": "media", "name": path, "ifGenerationMatch": str(generation)}
        kind = {"Content-Type": "application/octet-stream"}
        try:
            # Asking again is safe: what was written the first time has another generation.
            answer = access.ask(
                f"writing gs://{self.name}/{path}", lambda: access.rest("POST", url, query, data=data, headers=kind)
            )
        except Changed:
            there = self.read(path)
            if there is None or there.data != data:
                raise
            return there.generation  # it was us: only the answer was lost
        return int(answer.json()["generation"])

    def delete(self, path: str) -> None:
        """See Bucket."""
        access = self._access
        with contextlib.suppress(NotFound):
            access.ask(f"deleting gs://{self.name}/{path}", lambda: access.rest("DELETE", self._object(path), {}))

    def _object(self, path: str) -> str:
        return f"{bucket_url(self._access, self.name)}/o/{quote(path, safe='')}"
