"""Long-running operations: they end when their time has come, whether or not anybody asks."""

import secrets
import time
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, timestamp_pb2

from tpuswarm.cloud.rehearsal.common.records import Records
from tpuswarm.cloud.rehearsal.common.refused import Refused, not_found

KEPT_S = 24 * 3600
"""An operation is forgotten that long after it has ended."""


def now() -> Any:
    """As a Timestamp."""
    stamp = timestamp_pb2.Timestamp()
    stamp.FromNanoseconds(time.time_ns())
    return stamp


class Operations:
    """google.longrunning.Operations."""

    def __init__(self, records: Records):
        self._table = records.table(
            "operation",
            operations_pb2.Operation.FromString,
            lambda operation: operation.SerializeToString(),
        )

    def begin(self, target: str, verb: str) -> Any:
        """A new operation on `target`, that is not done."""
        place = "/".join(target.split("/")[:4])
        name = f"{place}/operations/operation-{time.time_ns() // 1_000_000}-{secrets.token_hex(8)}"
        about = cloud_tpu.OperationMetadata.pb(
            cloud_tpu.OperationMetadata(target=target, verb=verb, api_version="v2", create_time=now())
        )
        operation = operations_pb2.Operation(name=name)
        operation.metadata.Pack(about)
        self._table.put(name, operation)
        return operation

    def succeed(self, name: str, answer: Any) -> None:
        """It is done. An operation that was deleted stays so."""
        if operation := self._end(name):
            operation.response.Pack(answer)
            self._table.put(name, operation)

    def fail(self, name: str, why: Refused) -> None:
        """It has failed."""
        if operation := self._end(name):
            operation.error.CopyFrom(why.status())
            self._table.put(name, operation)

    def _end(self, name: str) -> Any:
        operation = self._table.get(name)
        if operation is None or operation.done:
            return None
        operation.done = True
        about = self._about(operation)
        about.end_time = now()
        operation.metadata.Pack(cloud_tpu.OperationMetadata.pb(about))
        return operation

    def _about(self, operation: Any) -> Any:
        about = cloud_tpu.OperationMetadata.pb(cloud_tpu.OperationMetadata())
        operation.metadata.Unpack(about)
        return cloud_tpu.OperationMetadata(about)

    def forget_old(self) -> None:
        """Drop those that ended long ago."""
        for name, operation in self._table.items():
            if operation.done and self._about(operation).end_time.timestamp() < time.time() - KEPT_S:
                self._table.pop(name)

    def GetOperation(self, request: Any) -> Any:
        operation = self._table.get(request.name)
        if operation is None:
            raise not_found(request.name)
        return operation

    def ListOperations(self, request: Any) -> Any:
        found = [each for name, each in self._table.items() if name.startswith(f"{request.name}/")]
        return operations_pb2.ListOperationsResponse(operations=found)

    def DeleteOperation(self, request: Any) -> Any:
        self._table.pop(self.GetOperation(request).name)
        return empty_pb2.Empty()

    def CancelOperation(self, request: Any) -> Any:
        """Best effort says the API; nothing here can be cancelled."""
        self.GetOperation(request)
        return empty_pb2.Empty()
