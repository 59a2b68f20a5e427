"""Guest attributes: values that hosts publish, such as their SSH keys."""

from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu

from tpuswarm.cloud.rehearsal.common.api import NOT_FOUND, Refused
from tpuswarm.cloud.rehearsal.common.hosts import Hosts
from tpuswarm.cloud.rehearsal.common.records import Records, Table


class GuestAttributes:
    """Values by host and `NAMESPACE/KEY`."""

    def __init__(self, records: Records, hosts: Hosts):
        self._table: Table[dict[str, str]] = records.table("guest attributes")
        self._hosts = hosts

    def write(self, host_id: str, path: str, value: str) -> None:
        self._table.put(host_id, {**(self._table.get(host_id) or {}), path: value})

    def delete(self, host_id: str, path: str) -> None:
        self._table.put(host_id, {key: value for key, value in self.read(host_id).items() if key != path})

    def read(self, host_id: str, query: str = "") -> dict[str, str]:
        """Return the values under `NAMESPACE/`, or of one `NAMESPACE/KEY`; by default all."""
        values: dict[str, str] = self._table.get(host_id) or {}
        prefix = query if not query or query.endswith("/") else f"{query}/"
        return {path: value for path, value in values.items() if path == query or path.startswith(prefix)}

    def forget(self, host_id: str) -> None:
        self._table.pop(host_id)

    def GetGuestAttributes(self, request: Any) -> Any:
        attributes = []
        for host in self._hosts.list_workers(request.name):
            if request.worker_ids and str(host.number) not in request.worker_ids:
                continue
            entries = [
                cloud_tpu.GuestAttributesEntry(namespace=path.split("/", 1)[0], key=path.split("/", 1)[1], value=value)
                for path, value in self.read(host.id, request.query_path).items()
            ]
            value = cloud_tpu.GuestAttributesValue(items=entries)
            attributes.append(cloud_tpu.GuestAttributes(query_path=request.query_path, query_value=value))
        if not any(attribute.query_value.items for attribute in attributes):
            raise Refused(NOT_FOUND, f"No guest attributes were found for '{request.query_path}' of '{request.name}'")
        answer = cloud_tpu.GetGuestAttributesResponse(guest_attributes=attributes)
        return cloud_tpu.GetGuestAttributesResponse.pb(answer)
