"""Reads refusals out of what Google's libraries raise and return. Imports them only once something has failed."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.google.failures import HTTP, Answer, judge, not_signed_in, unreachable


def translate(error: Exception, doing: str, project: str) -> CloudError | None:
    """The error of ours for an exception of Google's libraries; None for what is not theirs."""
    import requests
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    if isinstance(error, api.RetryError) and isinstance(error.cause, Exception):
        return translate(error.cause, doing, project)
    if isinstance(error, api.GoogleAPICallError):
        return judge(of_call(error), doing, project)
    if isinstance(error, auth.TransportError | requests.RequestException | api.RetryError):
        return unreachable(error, doing)
    if isinstance(error, auth.GoogleAuthError):
        return not_signed_in(error)
    return None


def of_call(error: Any) -> Answer:
    """Of a GoogleAPICallError, from gRPC or REST."""
    if hasattr(error.response, "json"):  # the storage client puts all of the answer into its message
        with suppress(ValueError):
            return of_json(error.response.json(), error.code)
    code = error.grpc_status_code.name if error.grpc_status_code else HTTP.get(error.code, f"HTTP {error.code}")
    if "Getting metadata from plugin failed" in error.message:  # gRPC's word for credentials that are no longer good
        code = "UNAUTHENTICATED"
    reason = error.reason or next((each.get("reason", "") for each in error.errors if isinstance(each, Mapping)), "")
    return _with_details(code, error.message, error.details, reason, error.metadata)


def of_status(status: Any) -> Answer:
    """Of a google.rpc.Status: why a TPU operation or a queued resource failed. Its details are packed."""
    from google.rpc import error_details_pb2

    details: list[Any] = []
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.QuotaFailure):
            if packed.Is(kind.DESCRIPTOR):
                packed.Unpack(unpacked := kind())
                details.append(unpacked)
    return _with_details(_name(status.code), status.message, details)


def of_json(body: Mapping[str, Any], status: int) -> Answer:
    """Of a REST answer: {"error": {"code", "message", "status", "errors", "details"}}."""
    error = body.get("error") or {}
    infos = [each for each in error.get("details", ()) if each.get("@type", "").endswith("google.rpc.ErrorInfo")]
    quotas = [each for each in error.get("details", ()) if each.get("@type", "").endswith("google.rpc.QuotaFailure")]
    reasons = [each.get("reason", "") for each in [*infos, *error.get("errors", ())]]
    return Answer(
        error.get("status") or HTTP.get(status, f"HTTP {status}"),
        error.get("message") or f"HTTP {status}",
        next(iter(reasons), ""),
        next((each.get("metadata") or each.get("metadatas") or {} for each in infos), {}),
        next((_first(each.get("violations", ()), lambda one: one.get("description", "")) for each in quotas), None),
    )


def of_json_status(status: Mapping[str, Any]) -> Answer:
    """Of a google.rpc.Status as REST writes it."""
    return of_json({"error": {**status, "status": _name(status.get("code", 0))}}, 0)


def _name(code: int) -> str:
    """Of a google.rpc.Code, one of those that may come later included."""
    from google.rpc import code_pb2

    names: dict[int, str] = {value: name for name, value in code_pb2.Code.items()}
    return names.get(code, f"code {code}")


def of_compute(operation: Any) -> Answer | None:
    """Of a Compute Engine operation; None if it has not failed."""
    if not operation.error.errors:
        return None
    first = operation.error.errors[0]
    infos = [each.error_info for each in first.error_details if each.error_info.reason]
    limits = [each.quota_info.limit_name for each in first.error_details if each.quota_info.limit_name]
    reason, metadata = (infos[0].reason, dict(infos[0].metadatas)) if infos else ("", {})
    return Answer(first.code, first.message, reason, metadata, next(iter(limits), None))


def _with_details(
    code: str, message: str, details: Iterable[Any], reason: str = "", metadata: Mapping[str, str] | None = None
) -> Answer:
    quota = None
    for each in details:
        if hasattr(each, "violations") and type(each).__name__ == "QuotaFailure":
            quota = _first(each.violations, lambda one: one.description)
        elif type(each).__name__ == "ErrorInfo":
            reason, metadata = each.reason, dict(each.metadata)
    return Answer(code, message, reason or "", metadata or {}, quota)


def _first(violations: Iterable[Any], text: Any) -> str:
    return next((text(each) for each in violations), "")
