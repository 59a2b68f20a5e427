"""Long-running operations."""

import secrets
import time
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, timestamp_pb2

from tpuswarm.cloud.rehearsal.common.api import Refused, not_found
from tpuswarm.cloud.rehearsal.common.records import Records

RETENTION_S = 24 * 3600


def now() -> Any:
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromNanoseconds(time.time_ns())
    return timestamp


class Operations:
    """google.longrunning.Operations."""

    def __init__(self, records: Records):
        self._table = records.table(
            "operation",
            operations_pb2.Operation.FromString,
            lambda operation: operation.SerializeToString(),
        )

    def begin(self, target: str, verb: str) -> Any:
        location = "/".join(target.split("/")[:4])
        name = f"{location}/operations/operation-{time.time_ns() // 1_000_000}-{secrets.token_hex(8)}"
        metadata = cloud_tpu.OperationMetadata(target=target, verb=verb, api_version="v2", create_time=now())
        operation = operations_pb2.Operation(name=name)
        operation.metadata.Pack(cloud_tpu.OperationMetadata.pb(metadata))
        self._table.put(name, operation)
        return operation

    def succeed(self, name: str, response: Any) -> None:
        """End an operation with a response, unless it was deleted."""
        if operation := self._end(name):
            operation.response.Pack(response)
            self._table.put(name, operation)

    def fail(self, name: str, error: Refused) -> None:
        """End an operation with an error, unless it was deleted."""
        if operation := self._end(name):
            operation.error.CopyFrom(error.status())
            self._table.put(name, operation)

    def _end(self, name: str) -> Any:
        operation = self._table.get(name)
        if operation is None or operation.done:
            return None
        operation.done = True
        metadata = self._metadata(operation)
        metadata.end_time = now()
        operation.metadata.Pack(cloud_tpu.OperationMetadata.pb(metadata))
        return operation

    def _metadata(self, operation: Any) -> Any:
        metadata = cloud_tpu.OperationMetadata.pb(cloud_tpu.OperationMetadata())
        operation.metadata.Unpack(metadata)
        return cloud_tpu.OperationMetadata(metadata)

    def forget_old(self) -> None:
        """Delete operations that ended longer than RETENTION_S ago."""
        for name, operation in self._table.items():
            if operation.done and self._metadata(operation).end_time.timestamp() < time.time() - RETENTION_S:
                self._table.pop(name)

    def GetOperation(self, request: Any) -> Any:
        operation = self._table.get(request.name)
        if operation is None:
            raise not_found(request.name)
        return operation

    def ListOperations(self, request: Any) -> Any:
        prefix = f"{request.name}/"
        operations = [operation for name, operation in self._table.items() if name.startswith(prefix)]
        return operations_pb2.ListOperationsResponse(operations=operations)

    def DeleteOperation(self, request: Any) -> Any:
        self._table.pop(self.GetOperation(request).name)
        return empty_pb2.Empty()

    def CancelOperation(self, request: Any) -> Any:
        """Do nothing: cancellation is best effort, and nothing here can be cancelled."""
        self.GetOperation(request)
        return empty_pb2.Empty()
