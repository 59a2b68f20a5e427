"""Buckets and their objects on the disk. A write may name the generation that it replaces, and replaces no other."""

import base64
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import google_crc32c

from tpuswarm.cloud.rehearsal.common.call import Rejected
from tpuswarm.cloud.rehearsal.common.records import Records, Table

Resource = dict[str, Any]
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
FIXED = {
    *("kind", "id", "name", "bucket", "project", "generation", "metageneration", "size", "md5Hash", "crc32c", "etag"),
    *("selfLink", "mediaLink", "timeCreated", "updated", "location", "locationType"),
}
"""What no client changes."""


class Condition(NamedTuple):
    """What a request demands of an object that is there; 0: that there is none."""

    match: int | None = None
    not_match: int | None = None
    metageneration: int | None = None
    not_metageneration: int | None = None

    @classmethod
    def of(cls, query: dict[str, str], prefix: str = "if") -> "Condition":
        """From a request's ifGenerationMatch and its like."""

        def number(name: str) -> int | None:
            if not re.fullmatch(r"\d+", query.get(name, "0")):
                raise Rejected(400, "invalid", f"Invalid value for {name}: '{query[name]}'")
            return int(query[name]) if name in query else None

        return cls(
            number(f"{prefix}GenerationMatch"),
            number(f"{prefix}GenerationNotMatch"),
            number(f"{prefix}MetagenerationMatch"),
            number(f"{prefix}MetagenerationNotMatch"),
        )

    def is_unchanged(self, there: Resource) -> bool:
        """Whether a client that asks for changes knows what is there."""
        generation, metageneration = there.get("generation"), int(there["metageneration"])
        same = self.not_match is not None and str(self.not_match) == generation
        return same or self.not_metageneration == metageneration

    def check(self, there: Resource | None) -> None:
        """Raises Rejected unless it holds."""
        generation = int(there.get("generation", 0)) if there else 0
        metageneration = int(there["metageneration"]) if there else None
        if (
            (self.match is not None and self.match != generation)
            or (self.not_match is not None and self.not_match == generation)
            or (self.metageneration is not None and self.metageneration != metageneration)
            or (self.not_metageneration is not None and self.not_metageneration == metageneration)
        ):
            raise Rejected(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")


class Objects:
    """All buckets of all projects. Every verb is done, and on the disk, when it returns."""

    def __init__(self, records: Records, folder: Path, check_write: Callable[[str, str, bool], None] = lambda *_: None):
        """`folder`: where the objects' bytes are, in a file for each generation.

        check_write: called before an object is written or deleted, with its bucket, its name, and whether it is there.
        """
        self._records, self._folder, self._check_write = records, folder, check_write
        self._buckets: Table[Resource] = records.table("bucket")
        self._objects: Table[Resource] = records.table("object")
        self._by_bucket: dict[str, set[str]] = {}
        for each in self._objects.values():
            self._by_bucket.setdefault(each["bucket"], set()).add(each["name"])
        folder.mkdir(parents=True, exist_ok=True)
        self._generation = max((int(each["generation"]) for each in self._objects.values()), default=0)
        known = {each["generation"] for each in self._objects.values()}
        for file in folder.iterdir():  # what was being written when the server was killed
            if file.name.isdigit() and file.name not in known:
                file.unlink()

    # Buckets.

    def bucket(self, name: str) -> Resource:
        """Raises Rejected if there is none."""
        found = self._buckets.get(name)
        if found is None:
            raise Rejected(404, "notFound", "The specified bucket does not exist.")
        return found

    def names(self) -> list[str]:
        """Return the names of all buckets."""
        return list(self._buckets)

    def buckets(self, project: str, prefix: str) -> list[Resource]:
        """A project's."""
        return [
            each for each in self._buckets.values() if each["project"] == project and each["name"].startswith(prefix)
        ]

    def make_bucket(self, project: str, body: Resource) -> Resource:
        """Raises Rejected if its name is taken, in any project."""
        name = body.get("name", "")
        if name in self._buckets:
            if self._buckets[name]["project"] == project:
                why = "Your previous request to create the named bucket succeeded and you already own it."
            else:
                why = "The requested bucket name is not available. The bucket namespace is shared by all users."
            raise Rejected(409, "conflict", why)
        if not BUCKET_NAME.fullmatch(name) or name.startswith("goog") or re.fullmatch(r"[\d.]+", name):
            raise Rejected(400, "invalid", f"Invalid bucket name: '{name}'")
        now = stamp()
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
        """Its labels, rules and so on."""
        there = self.bucket(name)
        bucket = {**_merge(there, changes, "labels"), "updated": stamp()}
        bucket["metageneration"] = str(int(bucket["metageneration"]) + 1)
        self._buckets.put(name, bucket)
        self._records.commit()
        return bucket

    def delete_bucket(self, name: str) -> None:
        """Raises Rejected while there is something in it."""
        self.bucket(name)
        if self._by_bucket.get(name):
            raise Rejected(409, "conflict", "The bucket you tried to delete is not empty.")
        self._buckets.pop(name)
        self._records.commit()

    # Objects.

    def find(self, bucket: str, name: str, generation: str | None = None) -> Resource:
        """Raises Rejected if there is none, or only one of another generation."""
        self.bucket(bucket)
        found = self._objects.get(f"{bucket}/{name}")
        if found is None or generation not in (None, found["generation"]):
            raise Rejected(404, "notFound", f"No such object: {bucket}/{name}")
        return found

    def check(self, bucket: str, name: str, condition: Condition) -> None:
        """Raises Rejected unless it holds, or if there is no such bucket."""
        self.bucket(bucket)
        condition.check(self._objects.get(f"{bucket}/{name}"))

    def write(self, bucket: str, name: str, data: bytes, about: Resource, condition: Condition) -> Resource:
        """Put `data` in the place of what is there, if the condition holds."""
        self.check(bucket, name, condition)
        self._check_write(bucket, name, f"{bucket}/{name}" in self._objects)
        if not name or len(name.encode()) > 1024 or name in (".", "..") or re.search(r"[\r\n]", name):
            raise Rejected(400, "invalid", f"Invalid object name: '{name}'")
        checksums = {
            "md5Hash": base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode(),
            "crc32c": base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode(),
        }
        about = dict(about)
        for kind, right in checksums.items():
            if about.pop(kind, right) != right:
                raise Rejected(400, "invalid", f"Provided {kind} doesn't match calculated {kind} {right!r}.")
        # Like Google's, a number that grows and looks like a time; two writes in one microsecond differ as well.
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        generation = str(self._generation)
        (self._folder / generation).write_bytes(data)
        now = stamp()
        link = f"storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        made = {
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            **about,
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
        self._replace(bucket, name, made)
        return made

    def change(self, bucket: str, name: str, changes: Resource, condition: Condition) -> Resource:
        """Its metadata."""
        found = self.find(bucket, name)
        condition.check(found)
        made = _merge(found, changes, "metadata")
        made |= {"metageneration": str(int(found["metageneration"]) + 1), "updated": stamp()}
        self._objects.put(f"{bucket}/{name}", made)
        self._records.commit()
        return made

    def delete(self, bucket: str, name: str, condition: Condition) -> None:
        """Raises Rejected if it is not there, or the condition does not hold."""
        condition.check(self.find(bucket, name))
        self._check_write(bucket, name, True)
        self._replace(bucket, name, None)

    def read(self, found: Resource, first: int = 0, count: int | None = None) -> bytes:
        """Its bytes from `first` on."""
        with (self._folder / found["generation"]).open("rb") as file:
            file.seek(first)
            return file.read(-1 if count is None else count)

    def listing(self, bucket: str, query: dict[str, str]) -> Iterator[Resource | str]:
        """Objects, and folders as texts, in the order of their names."""
        self.bucket(bucket)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        first, end = query.get("startOffset", ""), query.get("endOffset")
        glob = _glob(query["matchGlob"]) if "matchGlob" in query else None
        seen: set[str] = set()
        for name in sorted(self._by_bucket.get(bucket, ())):
            if not name.startswith(prefix) or name < first or (end and name >= end):
                continue
            if glob and not glob.fullmatch(name):
                continue
            rest = name.removeprefix(prefix)
            if delimiter and delimiter in rest:
                folder = prefix + rest.split(delimiter, 1)[0] + delimiter
                if folder not in seen:
                    seen.add(folder)
                    yield folder
                if not (name == folder and query.get("includeTrailingDelimiter") == "true"):
                    continue
            yield self._objects[f"{bucket}/{name}"]

    def _replace(self, bucket: str, name: str, made: Resource | None) -> None:
        before = self._objects.get(f"{bucket}/{name}")
        if made is None:
            self._objects.pop(f"{bucket}/{name}")
            self._by_bucket[bucket].discard(name)
        else:
            self._objects.put(f"{bucket}/{name}", made)
            self._by_bucket.setdefault(bucket, set()).add(name)
        self._records.commit()
        if before:
            (self._folder / before["generation"]).unlink(missing_ok=True)


def _merge(there: Resource, changes: Resource, table: str) -> Resource:
    """Return a resource with changes; null removes an entry of its table, or all of them."""
    found = {**there, **{key: value for key, value in changes.items() if key not in FIXED}}
    if table in changes:
        entries = {**there.get(table, {}), **changes[table]} if changes[table] is not None else {}
        found[table] = {key: value for key, value in entries.items() if value is not None}
    return found


def _glob(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a matchGlob. Raises Rejected."""
    rules = {"**": ".*", "*": "[^/]*", "?": "[^/]", "{": "(?:", "}": ")"}
    found, depth = "", 0
    for token in re.findall(r"\*\*|\[[^\]]+\]|\\.|.", pattern, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if token == "," and depth:
            found += "|"
        elif len(token) > 2 and token[0] == "[":
            found += re.sub(r"^\[!", "[^", token)
        else:
            found += rules.get(token) or re.escape(token[-1])
    try:
        return re.compile(found, re.DOTALL)
    except re.error as error:
        raise Rejected(400, "invalid", f"Invalid glob: {pattern}") from error


def stamp() -> str:
    """Now, as Cloud Storage writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
