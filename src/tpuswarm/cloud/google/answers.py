"""Convert errors of Google's libraries and REST answers to our own; imports the libraries only after a failure."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.google.failures import (
    CODES_BY_STATUS,
    NO_CREDENTIALS,
    Answer,
    cloud_error_for,
    sign_in_error,
    unreachable_error,
)
from tpuswarm.train.storage.credentials import UsedCredentials


def to_cloud_error(
    error: Exception, doing: str, project: str, used: UsedCredentials = NO_CREDENTIALS, project_note: str = ""
) -> CloudError | None:
    """Return our error for an exception of Google's libraries; None for any other exception."""
    import requests
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    if isinstance(error, api.RetryError) and isinstance(error.cause, Exception):
        return to_cloud_error(error.cause, doing, project, used, project_note)
    if isinstance(error, api.GoogleAPICallError):
        return cloud_error_for(answer_from_call(error), doing, project, used, project_note)
    if isinstance(error, auth.TransportError | requests.RequestException | api.RetryError):
        return unreachable_error(error, doing)
    if isinstance(error, auth.GoogleAuthError):
        return sign_in_error(error, used)
    return None


def answer_from_call(error: Any) -> Answer:
    if hasattr(error.response, "json"):  # the storage client's message is the whole answer
        with suppress(ValueError):
            return answer_from_json(error.response.json(), error.code)
    named = error.grpc_status_code
    code = named.name if named else CODES_BY_STATUS.get(error.code, f"HTTP {error.code}")
    if "Getting metadata from plugin failed" in error.message:  # gRPC's phrase for expired credentials
        code = "UNAUTHENTICATED"
    reasons = (detail.get("reason", "") for detail in error.errors if isinstance(detail, Mapping))
    reason = error.reason or next(reasons, "")
    return _answer_with_details(code, error.message, error.details, reason, error.metadata)


def answer_from_status(status: Any) -> Answer:
    """Read a google.rpc.Status of a failed TPU operation or queued resource."""
    from google.rpc import error_details_pb2

    details: list[Any] = []
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.QuotaFailure):
            if packed.Is(kind.DESCRIPTOR):
                packed.Unpack(unpacked := kind())
                details.append(unpacked)
    return _answer_with_details(_code_name(status.code), status.message, details)


def answer_from_json(body: Mapping[str, Any], status: int) -> Answer:
    """Read a REST answer: {"error": {"code", "message", "status", "errors", "details"}}."""
    error = body.get("error") or {}
    infos = _details_of_type(error, "google.rpc.ErrorInfo")
    quotas = _details_of_type(error, "google.rpc.QuotaFailure")
    reasons = [detail.get("reason", "") for detail in [*infos, *error.get("errors", ())]]
    violations = [violation for quota in quotas[:1] for violation in quota.get("violations", ())]
    return Answer(
        error.get("status") or CODES_BY_STATUS.get(status, f"HTTP {status}"),
        error.get("message") or f"HTTP {status}",
        next(iter(reasons), ""),
        next((info.get("metadata") or info.get("metadatas") or {} for info in infos), {}),
        next((violation.get("description", "") for violation in violations), "") if quotas else None,
    )


def _details_of_type(error: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [detail for detail in error.get("details", ()) if detail.get("@type", "").endswith(name)]


def answer_from_json_status(status: Mapping[str, Any]) -> Answer:
    return answer_from_json({"error": {**status, "status": _code_name(status.get("code", 0))}}, 0)


def _code_name(code: int) -> str:
    """Return the name of a google.rpc.Code, also of one that is unknown here."""
    from google.rpc import code_pb2

    names: dict[int, str] = {value: name for name, value in code_pb2.Code.items()}
    return names.get(code, f"code {code}")


def answer_from_operation(operation: Mapping[str, Any]) -> Answer | None:
    """Read a Compute Engine operation; None if it has not failed."""
    errors = operation.get("error", {}).get("errors")
    if not errors:
        return None
    error: Mapping[str, Any] = errors[0]
    infos = [detail["errorInfo"] for detail in error.get("errorDetails", ()) if "errorInfo" in detail]
    limits = [detail["quotaInfo"].get("limitName") for detail in error.get("errorDetails", ()) if "quotaInfo" in detail]
    info: Mapping[str, Any] = next((info for info in infos if info.get("reason")), {})
    quota = next(filter(None, limits), None)
    return Answer(error["code"], error.get("message", ""), info.get("reason", ""), info.get("metadatas", {}), quota)


def _answer_with_details(
    code: str, message: str, details: Iterable[Any], reason: str = "", metadata: Mapping[str, str] | None = None
) -> Answer:
    quota = None
    for detail in details:
        if hasattr(detail, "violations") and type(detail).__name__ == "QuotaFailure":
            quota = next((violation.description for violation in detail.violations), "")
        elif type(detail).__name__ == "ErrorInfo":
            reason, metadata = detail.reason, dict(detail.metadata)
    return Answer(code, message, reason or "", metadata or {}, quota)
