"""Google's real answers, from public threads, become our errors, which say what to do."""

import json
import tomllib
from pathlib import Path

import grpc
import pytest
import requests
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from tpuswarm.cloud import errors
from tpuswarm.cloud.google.answers import (
    answer_from_call,
    answer_from_json,
    answer_from_operation,
    answer_from_status,
    to_cloud_error,
)
from tpuswarm.cloud.google.failures import Answer, cloud_error_for

FIXTURES = tomllib.loads((Path(__file__).parent / "answers.toml").read_text())
ANSWERS, OPERATIONS = FIXTURES["answer"], FIXTURES["operation"]
DOING = "creating n1 in us-central1-f"


def details(fixture: dict) -> list:
    details = []
    if "quota" in fixture:
        violation = error_details_pb2.QuotaFailure.Violation(description=fixture["quota"])
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if "reason" in fixture:
        details.append(error_details_pb2.ErrorInfo(reason=fixture["reason"], metadata=fixture["metadata"]))
    return details


def from_call(fixture: dict) -> Answer:
    kind = api.from_grpc_status(grpc.StatusCode[fixture["code"]], fixture["message"]).__class__
    info = next((detail for detail in details(fixture) if isinstance(detail, error_details_pb2.ErrorInfo)), None)
    raised = kind(fixture["message"], details=details(fixture), error_info=info)
    return answer_from_call(raised)


def from_status(fixture: dict) -> Answer:
    status = status_pb2.Status(code=code_pb2.Code.Value(fixture["code"]), message=fixture["message"])
    for detail in details(fixture):
        (packed := any_pb2.Any()).Pack(detail)
        status.details.append(packed)
    return answer_from_status(status)


def from_json(fixture: dict) -> Answer:
    error: dict = {"message": fixture["message"], "status": fixture["code"], "details": []}
    if "quota" in fixture:
        violations = [{"description": fixture["quota"]}]
        error["details"].append({"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": violations})
    if "reason" in fixture:
        info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo"} | {k: fixture[k] for k in ("reason", "metadata")}
        error["details"].append(info)
    return answer_from_json({"error": error}, 400)


def check(answer: Answer, fixture: dict) -> None:
    error = cloud_error_for(answer, DOING, "my-project")
    assert type(error).__name__ == fixture["is"]
    assert str(error).startswith(DOING) and error.code == answer.code
    assert fixture.get("way", "") in str(error)
    if "limit" in fixture:
        assert error.limit == fixture["limit"]
    if "permission" in fixture:
        assert error.permission == fixture["permission"]
        assert fixture["role"] in str(error) and "gcloud projects add-iam-policy-binding my-project" in str(error)


@pytest.mark.parametrize("fixture", ANSWERS, ids=lambda fixture: fixture["message"][:50])
def test_answer_means_the_same_over_grpc_rest_and_in_operations(fixture):
    for read in [from_call] if fixture.get("only") else [from_call, from_status, from_json]:
        check(read(fixture), fixture)


@pytest.mark.parametrize("fixture", OPERATIONS, ids=lambda fixture: fixture["code"])
def test_failed_compute_operation_becomes_an_error(fixture):
    from google.cloud import compute_v1  # takes seconds

    detail = compute_v1.ErrorDetails(
        error_info=compute_v1.ErrorInfo(reason=fixture.get("reason", ""), metadatas=fixture.get("metadata", {}))
    )
    failed = compute_v1.Errors(code=fixture["code"], message=fixture["message"], error_details=[detail])
    operation = compute_v1.Operation(error=compute_v1.Error(errors=[failed]))
    check(answer_from_operation(json.loads(compute_v1.Operation.to_json(operation))), fixture)
    assert answer_from_operation({"name": "fine"}) is None


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (403, "quotaExceeded", errors.NoQuota),
        (403, "rateLimitExceeded", errors.Unreachable),
        (403, "accessNotConfigured", errors.Denied),
        (403, "forbidden", errors.Denied),
        (404, "notFound", errors.NotFound),
        (409, "alreadyExists", errors.Taken),
        (412, "conditionNotMet", errors.Changed),
        (400, "invalid", errors.Invalid),
        (401, "authError", errors.NotSignedIn),
        (500, "backendError", errors.Unreachable),
        (503, "backendError", errors.Unreachable),
    ],
)
def test_rest_answer_without_status_is_judged_by_code_and_reason(status, reason, kind):
    message = "Quota 'CPUS' exceeded" if kind is errors.NoQuota else "words"
    body = {"error": {"code": status, "message": message, "errors": [{"reason": reason}]}}
    assert type(cloud_error_for(answer_from_json(body, status), DOING, "p")) is kind
    raised = api.from_http_status(status, message, errors=[{"reason": reason}])
    assert type(cloud_error_for(answer_from_call(raised), DOING, "p")) is kind


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (auth.RefreshError("Reauthentication is needed."), errors.NotSignedIn, "gcloud auth application-default login"),
        (auth.DefaultCredentialsError("Your default credentials were not found. To set up …"), errors.NotSignedIn, ""),
        (auth.TransportError("HTTPSConnectionPool: Failed to resolve 'oauth2.example'"), errors.Unreachable, "resolve"),
        (requests.ConnectionError("Connection refused"), errors.Unreachable, "Google Cloud (Connection refused)"),
        (requests.Timeout("Read timed out."), errors.Unreachable, "timed out"),
        (api.RetryError("too long", api.ServiceUnavailable("down")), errors.Unreachable, "down"),
        (api.RetryError("too long", None), errors.Unreachable, ""),
    ],
)
def test_failure_before_google_answers_becomes_one_sentence(raised, kind, words):
    error = to_cloud_error(raised, DOING, "p")
    assert type(error) is kind and words in str(error) and "\n" not in str(error)
