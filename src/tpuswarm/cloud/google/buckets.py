"""A bucket of Cloud Storage whose objects are written only if nobody else wrote them meanwhile."""

import contextlib

from tpuswarm.cloud.errors import Changed, NotFound
from tpuswarm.cloud.google.access import SECONDS, Access
from tpuswarm.cloud.protocol import Stored


class GoogleBucket:
    """Implements `Bucket`."""

    def __init__(self, access: Access, name: str):
        self._access = access
        self.name = name

    def read(self, path: str) -> Stored | None:
        """See Bucket. Raises NotFound where there is no such bucket."""
        blob = self._access.storage.bucket(self.name).blob(path)
        doing = f"reading gs://{self.name}/{path}"
        try:
            data = self._access.ask(doing, lambda: blob.download_as_bytes(timeout=SECONDS, retry=None))
        except NotFound:  # the object, or the bucket: Google's answers differ in words alone
            bucket = self._access.storage.bucket(self.name)
            if self._access.ask(doing, lambda: bucket.exists(timeout=SECONDS, retry=None)):
                return None
            raise NotFound(f"{doing}: there is no bucket {self.name}; `tpuswarm init` makes one") from None
        return Stored(data, int(blob.generation))

    def write(self, path: str, data: bytes, generation: int) -> int:
        """See Bucket."""
        blob = self._access.storage.bucket(self.name).blob(path)

        def upload() -> None:
            blob.upload_from_string(data, if_generation_match=generation, timeout=SECONDS, retry=None)

        try:
            # Asking again is safe: what was written the first time has another generation.
            self._access.ask(f"writing gs://{self.name}/{path}", upload)
        except Changed:
            there = self.read(path)
            if there is None or there.data != data:
                raise
            return there.generation  # it was us: only the answer was lost
        return int(blob.generation)

    def delete(self, path: str) -> None:
        """See Bucket."""
        blob = self._access.storage.bucket(self.name).blob(path)
        with contextlib.suppress(NotFound):
            self._access.ask(f"deleting gs://{self.name}/{path}", lambda: blob.delete(timeout=SECONDS, retry=None))
