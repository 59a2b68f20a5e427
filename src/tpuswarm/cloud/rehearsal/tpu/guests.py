"""Guest attributes: what hosts have written down for those outside."""

from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu

from tpuswarm.cloud.rehearsal.common.hosts import Hosts
from tpuswarm.cloud.rehearsal.common.records import Records, Table
from tpuswarm.cloud.rehearsal.common.refused import NOT_FOUND, Refused


class Guests:
    """By host: `NAMESPACE/KEY` and its value."""

    def __init__(self, records: Records, hosts: Hosts):
        self._table: Table[dict[str, str]] = records.table("guest attributes")
        self._hosts = hosts

    def write(self, host: str, path: str, value: str) -> None:
        """As a host does."""
        self._table.put(host, {**(self._table.get(host) or {}), path: value})

    def delete(self, host: str, path: str) -> None:
        """As a host does."""
        self._table.put(host, {key: value for key, value in self.read(host).items() if key != path})

    def read(self, host: str, query: str = "") -> dict[str, str]:
        """Under `NAMESPACE/`, or one `NAMESPACE/KEY`."""
        found: dict[str, str] = self._table.get(host) or {}
        prefix = query if not query or query.endswith("/") else f"{query}/"
        return {path: value for path, value in found.items() if path == query or path.startswith(prefix)}

    def forget(self, host: str) -> None:
        """It is gone."""
        self._table.pop(host)

    def GetGuestAttributes(self, request: Any) -> Any:
        wanted = set(request.worker_ids)
        found = []
        for host in self._hosts.of(request.name):
            if wanted and str(host.number) not in wanted:
                continue
            entries = [
                cloud_tpu.GuestAttributesEntry(namespace=path.split("/", 1)[0], key=path.split("/", 1)[1], value=value)
                for path, value in self.read(host.id, request.query_path).items()
            ]
            value = cloud_tpu.GuestAttributesValue(items=entries)
            found.append(cloud_tpu.GuestAttributes(query_path=request.query_path, query_value=value))
        if not any(each.query_value.items for each in found):
            raise Refused(NOT_FOUND, f"No guest attributes were found for '{request.query_path}' of '{request.name}'")
        answer = cloud_tpu.GetGuestAttributesResponse(guest_attributes=found)
        return cloud_tpu.GetGuestAttributesResponse.pb(answer)
