"""Store buckets and objects on the disk. A write may name the generation that it replaces."""

import base64
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import google_crc32c

from tpuswarm.cloud.rehearsal.common.api import Rejected
from tpuswarm.cloud.rehearsal.common.records import Records, Table

Resource = dict[str, Any]
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
READ_ONLY_FIELDS = {
    *("kind", "id", "name", "bucket", "project", "generation", "metageneration", "size", "md5Hash", "crc32c", "etag"),
    *("selfLink", "mediaLink", "timeCreated", "updated", "location", "locationType"),
}


class Condition(NamedTuple):
    """Generations that a request demands of the existing object; 0: there must be none."""

    match: int | None = None
    not_match: int | None = None
    metageneration: int | None = None
    not_metageneration: int | None = None

    @classmethod
    def from_query(cls, query: dict[str, str], prefix: str = "if") -> "Condition":
        """Parse ifGenerationMatch and its like. Raises Rejected."""
        numbers = []
        for condition in ("GenerationMatch", "GenerationNotMatch", "MetagenerationMatch", "MetagenerationNotMatch"):
            name = f"{prefix}{condition}"
            if not re.fullmatch(r"\d+", query.get(name, "0")):
                raise Rejected(400, "invalid", f"Invalid value for {name}: '{query[name]}'")
            numbers.append(int(query[name]) if name in query else None)
        return cls(*numbers)

    def is_unchanged(self, existing: Resource) -> bool:
        """Return whether a client already has the existing resource."""
        has_generation = self.not_match is not None and str(self.not_match) == existing.get("generation")
        return has_generation or self.not_metageneration == int(existing["metageneration"])

    def check(self, existing: Resource | None) -> None:
        """Raise Rejected if the condition does not hold."""
        generation = int(existing.get("generation", 0)) if existing else 0
        metageneration = int(existing["metageneration"]) if existing else None
        if (
            (self.match is not None and self.match != generation)
            or (self.not_match is not None and self.not_match == generation)
            or (self.metageneration is not None and self.metageneration != metageneration)
            or (self.not_metageneration is not None and self.not_metageneration == metageneration)
        ):
            raise Rejected(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")


class Objects:
    """All buckets of all projects. Every change is on the disk when its method returns. All methods raise Rejected."""

    def __init__(self, records: Records, folder: Path, check_write: Callable[[str, str, bool], None] = lambda *_: None):
        """`folder` has a file for each generation of an object.

        check_write: called before an object is written or deleted, with its bucket, its name, and whether it exists.
        """
        self._records, self._folder, self._check_write = records, folder, check_write
        self._buckets: Table[Resource] = records.table("bucket")
        self._objects: Table[Resource] = records.table("object")
        self._names_by_bucket: dict[str, set[str]] = {}
        for resource in self._objects.values():
            self._names_by_bucket.setdefault(resource["bucket"], set()).add(resource["name"])
        folder.mkdir(parents=True, exist_ok=True)
        generations = {resource["generation"] for resource in self._objects.values()}
        self._generation = max(map(int, generations), default=0)
        for file in folder.iterdir():  # a killed server leaves incomplete files
            if file.name.isdigit() and file.name not in generations:
                file.unlink()

    # Buckets.

    def bucket(self, name: str) -> Resource:
        bucket = self._buckets.get(name)
        if bucket is None:
            raise Rejected(404, "notFound", "The specified bucket does not exist.")
        return bucket

    def bucket_names(self) -> list[str]:
        return list(self._buckets)

    def list_buckets(self, project: str, prefix: str) -> list[Resource]:
        buckets = self._buckets.values()
        return [bucket for bucket in buckets if bucket["project"] == project and bucket["name"].startswith(prefix)]

    def make_bucket(self, project: str, body: Resource) -> Resource:
        name = body.get("name", "")
        if name in self._buckets:
            if self._buckets[name]["project"] == project:
                reason = "Your previous request to create the named bucket succeeded and you already own it."
            else:
                reason = "The requested bucket name is not available. The bucket namespace is shared by all users."
            raise Rejected(409, "conflict", reason)
        if not BUCKET_NAME.fullmatch(name) or name.startswith("goog") or re.fullmatch(r"[\d.]+", name):
            raise Rejected(400, "invalid", f"Invalid bucket name: '{name}'")
        now = format_now()
        location = (body.get("location") or "US").upper()
        bucket = {
            "storageClass": "STANDARD",
            **body,
            "kind": "storage#bucket",
            "id": name,
            "name": name,
            "project": project,
            "selfLink": f"https://www.googleapis.com/storage/v1/b/{name}",
            "location": location,
            "locationType": "region" if "-" in location else "multi-region",
            "timeCreated": now,
            "updated": now,
            "metageneration": "1",
            "etag": "CAE=",
        }
        self._buckets.put(name, bucket)
        self._records.commit()
        return bucket

    def change_bucket(self, name: str, changes: Resource) -> Resource:
        bucket = _merge(self.bucket(name), changes, "labels")
        self._buckets.put(name, bucket)
        self._records.commit()
        return bucket

    def delete_bucket(self, name: str) -> None:
        self.bucket(name)
        if self._names_by_bucket.get(name):
            raise Rejected(409, "conflict", "The bucket you tried to delete is not empty.")
        self._buckets.pop(name)
        self._records.commit()

    # Objects.

    def find(self, bucket: str, name: str, generation: str | None = None) -> Resource:
        """Return an object; None: of any generation."""
        self.bucket(bucket)
        resource = self._objects.get(f"{bucket}/{name}")
        if resource is None or generation not in (None, resource["generation"]):
            raise Rejected(404, "notFound", f"No such object: {bucket}/{name}")
        return resource

    def check(self, bucket: str, name: str, condition: Condition) -> None:
        """Check that the bucket exists and the condition holds."""
        self.bucket(bucket)
        condition.check(self._objects.get(f"{bucket}/{name}"))

    def write(self, bucket: str, name: str, data: bytes, fields: Resource, condition: Condition) -> Resource:
        """Write an object, or replace it if the condition holds."""
        self.check(bucket, name, condition)
        self._check_write(bucket, name, f"{bucket}/{name}" in self._objects)
        if not name or len(name.encode()) > 1024 or name in (".", "..") or re.search(r"[\r\n]", name):
            raise Rejected(400, "invalid", f"Invalid object name: '{name}'")
        checksums = {
            "md5Hash": base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode(),
            "crc32c": base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode(),
        }
        fields = dict(fields)
        for kind, correct in checksums.items():
            if fields.pop(kind, correct) != correct:
                raise Rejected(400, "invalid", f"Provided {kind} doesn't match calculated {kind} {correct!r}.")
        # Like Google's: a growing number that looks like a time and differs for two writes in one microsecond.
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        generation = str(self._generation)
        (self._folder / generation).write_bytes(data)
        now = format_now()
        link = f"storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        resource = {
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            **fields,
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{generation}",
            "selfLink": f"https://www.googleapis.com/{link}",
            "mediaLink": f"https://www.googleapis.com/download/{link}?generation={generation}&alt=media",
            "name": name,
            "bucket": bucket,
            "generation": generation,
            "metageneration": "1",
            "size": str(len(data)),
            **checksums,
            "etag": generation,
            "timeCreated": now,
            "updated": now,
        }
        self._replace(bucket, name, resource)
        return resource

    def change(self, bucket: str, name: str, changes: Resource, condition: Condition) -> Resource:
        existing = self.find(bucket, name)
        condition.check(existing)
        resource = _merge(existing, changes, "metadata")
        self._objects.put(f"{bucket}/{name}", resource)
        self._records.commit()
        return resource

    def delete(self, bucket: str, name: str, condition: Condition) -> None:
        condition.check(self.find(bucket, name))
        self._check_write(bucket, name, True)
        self._replace(bucket, name, None)

    def read(self, resource: Resource, first: int = 0, count: int = -1) -> bytes:
        """Return `count` bytes from `first` on; -1: all."""
        with (self._folder / resource["generation"]).open("rb") as file:
            file.seek(first)
            return file.read(count)

    def list_objects(self, bucket: str, query: dict[str, str]) -> Iterator[Resource | str]:
        """Yield objects, and folders as strings, in the order of their names."""
        self.bucket(bucket)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        first, end = query.get("startOffset", ""), query.get("endOffset")
        glob = _compile_glob(query["matchGlob"]) if "matchGlob" in query else None
        folders: set[str] = set()
        for name in sorted(self._names_by_bucket.get(bucket, ())):
            if not name.startswith(prefix) or name < first or (end and name >= end):
                continue
            if glob and not glob.fullmatch(name):
                continue
            rest = name.removeprefix(prefix)
            if delimiter and delimiter in rest:
                folder = prefix + rest.split(delimiter, 1)[0] + delimiter
                if folder not in folders:
                    folders.add(folder)
                    yield folder
                if not (name == folder and query.get("includeTrailingDelimiter") == "true"):
                    continue
            yield self._objects[f"{bucket}/{name}"]

    def _replace(self, bucket: str, name: str, resource: Resource | None) -> None:
        old = self._objects.get(f"{bucket}/{name}")
        if resource is None:
            self._objects.pop(f"{bucket}/{name}")
            self._names_by_bucket[bucket].discard(name)
        else:
            self._objects.put(f"{bucket}/{name}", resource)
            self._names_by_bucket.setdefault(bucket, set()).add(name)
        self._records.commit()
        if old:
            (self._folder / old["generation"]).unlink(missing_ok=True)


def _merge(existing: Resource, changes: Resource, table: str) -> Resource:
    """Return a resource with changes; null removes an entry of its table, or the whole table."""
    resource = {**existing, **{key: value for key, value in changes.items() if key not in READ_ONLY_FIELDS}}
    if table in changes:
        entries = {**existing.get(table, {}), **changes[table]} if changes[table] is not None else {}
        resource[table] = {key: value for key, value in entries.items() if value is not None}
    metageneration = str(int(existing["metageneration"]) + 1)
    return {**resource, "metageneration": metageneration, "updated": format_now()}


def _compile_glob(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a matchGlob. Raises Rejected."""
    rules = {"**": ".*", "*": "[^/]*", "?": "[^/]", "{": "(?:", "}": ")"}
    expression, depth = "", 0
    for token in re.findall(r"\*\*|\[[^\]]+\]|\\.|.", pattern, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if token == "," and depth:
            expression += "|"
        elif len(token) > 2 and token[0] == "[":
            expression += re.sub(r"^\[!", "[^", token)
        else:
            expression += rules.get(token) or re.escape(token[-1])
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise Rejected(400, "invalid", f"Invalid glob: {pattern}") from error


def format_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
