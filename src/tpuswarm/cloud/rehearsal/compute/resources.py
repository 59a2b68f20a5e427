"""Resources of Compute Engine: names, links, filtered lists, and operations on them."""

import base64
import datetime
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from tpuswarm.cloud.rehearsal.common.api import Call, Rejected
from tpuswarm.cloud.rehearsal.common.records import Records, Table
from tpuswarm.cloud.rehearsal.common.timetable import Timetable

BASE = "https://www.googleapis.com/compute/v1/"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
CONDITION = re.compile(r"""\(?\s*([\w.-]+)\s*(=|:|!=|\beq\b|\bne\b)\s*["']?([^"')]*)["']?\s*\)?""")
Resource = dict[str, Any]


def format_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def fingerprint(value: Any) -> str:
    """Return the fingerprint that a client must send to replace a value."""
    return base64.b64encode(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()[:8]).decode()


def zone_region(zone: str) -> str:
    return zone.rsplit("-", 1)[0]


def _scope(path: str) -> str:
    """Return the scope in a resource's path: `zones/us-central1-a` or `global`."""
    parts = path.split("/")
    return parts[2] if parts[2] == "global" else f"{parts[2]}/{parts[3]}"


class Resources:
    """All resources by path (projects/P/zones/Z/instances/NAME), and operations on them."""

    def __init__(self, records: Records, timetable: Timetable):
        self.table: Table[Resource] = records.table("compute resource")
        self._operations: Table[Resource] = records.table("compute operation")
        self._timetable = timetable
        timetable.register("operation over", self.finish)

    # Resources.

    def get(self, path: str) -> Resource:
        return _get(self.table, path)

    def add(self, path: str, body: Resource, kind: str) -> Resource:
        """Add a resource with the fields that all have. Raises Rejected if its name is invalid or taken."""
        name = path.rsplit("/", 1)[-1]
        if not NAME.fullmatch(name):
            raise Rejected(
                400,
                "invalid",
                f"Invalid value for field 'resource.name': '{name}'. Must be a match of regex '{NAME.pattern}'",
            )
        if path in self.table:
            raise Rejected(409, "alreadyExists", f"The resource '{path}' already exists")
        resource = {
            **body,
            "kind": f"compute#{kind}",
            "id": str(secrets.randbits(62)),
            "creationTimestamp": format_now(),
            "name": name,
            "selfLink": f"{BASE}{path}",
            **_location(path),
        }
        self.table.put(path, resource)
        return resource

    def page(self, resources: Iterable[Resource], call: Call, kind: str) -> Resource:
        """Return the requested page of a list. Raises Rejected if its filter is invalid."""
        matches = [resource for resource in resources if _matches(resource, call.query.get("filter", ""))]
        start, size = int(call.query.get("pageToken") or 0), int(call.query.get("maxResults") or 500)
        answer: Resource = {"kind": f"compute#{kind}List", "id": kind}
        if matches[start : start + size]:
            answer["items"] = matches[start : start + size]
        if start + size < len(matches):
            answer["nextPageToken"] = str(start + size)
        return answer

    def under(self, prefix: str) -> list[Resource]:
        return [
            resource
            for path, resource in self.table.items()
            if path.startswith(prefix) and "/" not in path.removeprefix(prefix)
        ]

    # Operations.

    def begin(self, verb: str, path: str, seconds: float, event: str = "", *arguments: Any) -> Resource:
        """Begin an operation of so many seconds on a resource; `event` of the timetable happens at its end."""
        name = f"operation-{time.time_ns() // 1_000_000}-{secrets.token_hex(8)}"
        operation_path = f"projects/{path.split('/')[1]}/{_scope(path)}/operations/{name}"
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
            "insertTime": format_now(),
            "startTime": format_now(),
            "selfLink": f"{BASE}{operation_path}",
            **_location(path),
        }
        self._operations.put(operation_path, operation)
        self._timetable.schedule(seconds, "operation over", operation_path, event, list(arguments))
        return operation

    def operation(self, path: str) -> Resource:
        return _get(self._operations, path)

    def operations(self, prefix: str) -> list[Resource]:
        return [operation for path, operation in self._operations.items() if path.startswith(prefix)]

    def forget_old(self) -> None:
        """Drop operations that ended long ago."""
        before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        for path, operation in self._operations.items():
            if datetime.datetime.fromisoformat(operation.get("endTime") or format_now()) < before:
                self._operations.pop(path)

    def fail(self, path: str, code: str, message: str) -> None:
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

    def finish(self, path: str, event: str = "", arguments: Iterable[Any] = ()) -> None:
        if event:
            self._timetable.run_now(event, *arguments, path)
        operation = self._operations.get(path)
        if operation is not None:
            self._operations.put(path, {**operation, "status": "DONE", "progress": 100, "endTime": format_now()})


def _get(table: Table[Resource], path: str) -> Resource:
    resource = table.get(path)
    if resource is None:
        raise Rejected(404, "notFound", f"The resource '{path}' was not found")
    return resource


def _location(path: str) -> Resource:
    """Return the field `zone` or `region` of a resource, which `global` ones lack."""
    kind, *_ = _scope(path).split("/")
    return {} if kind == "global" else {kind[:-1]: f"{BASE}{'/'.join(path.split('/')[:4])}"}


def _matches(resource: Resource, conditions: str) -> bool:
    """Return whether a resource matches a list's filter. Raises Rejected if that is invalid."""
    for condition in re.split(r"\s+AND\s+", conditions.strip()) if conditions.strip() else []:
        parts = CONDITION.fullmatch(condition.strip())
        if not parts:
            raise Rejected(
                400, "invalid", f"Invalid value for field 'filter': '{conditions}'. Invalid list filter expression."
            )
        key, operator, expected = parts[1], parts[2], parts[3].strip()
        value: Any = resource
        for part in key.split(".", 1) if key.startswith("labels.") else key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if operator in ("eq", "ne"):
            is_same = value is not None and re.fullmatch(expected, str(value)) is not None
        else:
            is_same = value is not None and (expected == "*" or str(value) == expected)
        if is_same == (operator in ("!=", "ne")):
            return False
    return True
