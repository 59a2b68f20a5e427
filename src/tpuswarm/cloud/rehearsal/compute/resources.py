"""What all resources of Compute Engine have: names, links, lists with filters, and operations on them."""

import base64
import datetime
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from tpuswarm.cloud.rehearsal.common.call import Call, Rejected
from tpuswarm.cloud.rehearsal.common.records import Records, Table
from tpuswarm.cloud.rehearsal.common.timetable import Timetable

BASE = "https://www.googleapis.com/compute/v1/"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
CONDITION = re.compile(r"""\(?\s*([\w.-]+)\s*(=|:|!=|\beq\b|\bne\b)\s*["']?([^"')]*)["']?\s*\)?""")
Resource = dict[str, Any]


def stamp() -> str:
    """Now, as Compute Engine writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def fingerprint(value: Any) -> str:
    """Of a part that is only replaced by who has seen it."""
    return base64.b64encode(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()[:8]).decode()


def scope_of(path: str) -> str:
    """`zones/us-central1-a` or `global` of a resource's path."""
    parts = path.split("/")
    return parts[2] if parts[2] == "global" else f"{parts[2]}/{parts[3]}"


def region_of_zone(zone: str) -> str:
    """us-central1 of us-central1-a."""
    return zone.rsplit("-", 1)[0]


class Resources:
    """All resources by path (projects/P/zones/Z/instances/NAME), and the operations that are under way."""

    def __init__(self, records: Records, timetable: Timetable):
        self.table: Table[Resource] = records.table("compute resource")
        self._operations: Table[Resource] = records.table("compute operation")
        self._timetable = timetable
        timetable.on("operation over", self._over)

    # Resources.

    def get(self, path: str) -> Resource:
        """Raises Rejected if there is none."""
        found = self.table.get(path)
        if found is None:
            raise Rejected(404, "notFound", f"The resource '{path}' was not found")
        return found

    def add(self, path: str, body: Resource, kind: str) -> Resource:
        """A new one with what every one has. Raises Rejected for a name that is taken or that no resource may have."""
        name = path.rsplit("/", 1)[-1]
        if not NAME.fullmatch(name):
            raise Rejected(
                400,
                "invalid",
                f"Invalid value for field 'resource.name': '{name}'. Must be a match of regex '{NAME.pattern}'",
            )
        if path in self.table:
            raise Rejected(409, "alreadyExists", f"The resource '{path}' already exists")
        scope = scope_of(path)
        where = {} if scope == "global" else {scope.split("/")[0][:-1]: f"{BASE}{'/'.join(path.split('/')[:4])}"}
        resource = {
            **body,
            "kind": f"compute#{kind}",
            "id": str(secrets.randbits(62)),
            "creationTimestamp": stamp(),
            "name": name,
            "selfLink": f"{BASE}{path}",
            **where,
        }
        self.table.put(path, resource)
        return resource

    def page(self, found: Iterable[Resource], call: Call, kind: str) -> Resource:
        """A page of a list. Raises Rejected for a filter that is not understood."""
        kept = [each for each in found if passes(each, call.query.get("filter", ""))]
        start, size = int(call.query.get("pageToken") or 0), int(call.query.get("maxResults") or 500)
        answer: Resource = {"kind": f"compute#{kind}List", "id": kind}
        if kept[start : start + size]:
            answer["items"] = kept[start : start + size]
        if start + size < len(kept):
            answer["nextPageToken"] = str(start + size)
        return answer

    def under(self, prefix: str) -> list[Resource]:
        """All whose path begins so, without those below them."""
        return [
            each
            for path, each in self.table.items()
            if path.startswith(prefix) and "/" not in path.removeprefix(prefix)
        ]

    # Operations.

    def begin(self, verb: str, path: str, seconds: float, then: str = "", *arguments: Any) -> Resource:
        """An operation on `path` that takes so long; `then` is what the timetable does when it is over."""
        scope = scope_of(path)
        project = path.split("/")[1]
        name = f"operation-{time.time_ns() // 1_000_000}-{secrets.token_hex(8)}"
        where = {} if scope == "global" else {scope.split("/")[0][:-1]: f"{BASE}projects/{project}/{scope}"}
        operation_path = f"projects/{project}/{scope}/operations/{name}"
        operation = {
            "kind": "compute#operation",
            "id": str(secrets.randbits(62)),
            "name": name,
            "operationType": verb,
            "targetLink": f"{BASE}{path}",
            "targetId": self.table[path]["id"] if path in self.table else "0",
            "status": "RUNNING",
            "progress": 0,
            "user": "rehearsal@example.com",
            "insertTime": stamp(),
            "startTime": stamp(),
            "selfLink": f"{BASE}{operation_path}",
            **where,
        }
        self._operations.put(operation_path, operation)
        self._timetable.after(seconds, "operation over", operation_path, then, list(arguments))
        return operation

    def operation(self, path: str) -> Resource:
        """Raises Rejected if there is none."""
        found = self._operations.get(path)
        if found is None:
            raise Rejected(404, "notFound", f"The resource '{path}' was not found")
        return found

    def operations(self, prefix: str) -> list[Resource]:
        """Those of a scope."""
        return [each for path, each in self._operations.items() if path.startswith(prefix)]

    def forget_old(self) -> None:
        """Drop operations that ended long ago."""
        before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        for path, operation in self._operations.items():
            if datetime.datetime.fromisoformat(operation.get("endTime") or stamp()) < before:
                self._operations.pop(path)

    def fail(self, path: str, code: str, message: str) -> None:
        """It ends with an error."""
        status = {"ZONE_RESOURCE_POOL_EXHAUSTED": 503, "QUOTA_EXCEEDED": 403}.get(code, 400)
        self._operations.put(
            path,
            {
                **self._operations[path],
                "error": {"errors": [{"code": code, "message": message}]},
                "httpErrorStatusCode": status,
                "httpErrorMessage": {503: "SERVICE UNAVAILABLE", 403: "FORBIDDEN"}.get(status, "BAD REQUEST"),
            },
        )

    def _over(self, path: str, then: str, arguments: list[Any]) -> None:
        if then:
            self._timetable.happen(then, *arguments, path)
        operation = self._operations.get(path)
        if operation is not None:
            self._operations.put(path, {**operation, "status": "DONE", "progress": 100, "endTime": stamp()})


def passes(resource: Resource, conditions: str) -> bool:
    """Whether a resource is among those that a list's filter wants. Raises Rejected for one that is not understood."""
    for condition in re.split(r"\s+AND\s+", conditions.strip()) if conditions.strip() else []:
        found = CONDITION.fullmatch(condition.strip())
        if not found:
            raise Rejected(
                400, "invalid", f"Invalid value for field 'filter': '{conditions}'. Invalid list filter expression."
            )
        key, operator, wanted = found[1], found[2], found[3].strip()
        value: Any = resource
        for part in key.split(".", 1) if key.startswith("labels.") else key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if operator in ("eq", "ne"):
            same = value is not None and re.fullmatch(wanted, str(value)) is not None
        else:
            same = value is not None and (wanted == "*" or str(value) == wanted)
        if same == (operator in ("!=", "ne")):
            return False
    return True
