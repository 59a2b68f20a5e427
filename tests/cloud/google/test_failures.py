"""What Google really answered, from public threads, becomes the error of ours that says what to do about it."""

import tomllib
from pathlib import Path

import grpc
import pytest
import requests
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.cloud import compute_v1
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from tpuswarm.cloud import errors
from tpuswarm.cloud.google.answers import of_call, of_compute, of_json, of_status, translate
from tpuswarm.cloud.google.failures import Answer, judge

FIXTURES = tomllib.loads((Path(__file__).parent / "answers.toml").read_text())
ANSWERS, OPERATIONS = FIXTURES["answer"], FIXTURES["operation"]
DOING = "creating n1 in us-central1-f"


def details(fixture: dict) -> list:
    found = []
    if "quota" in fixture:
        violation = error_details_pb2.QuotaFailure.Violation(description=fixture["quota"])
        found.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if "reason" in fixture:
        info = error_details_pb2.ErrorInfo(reason=fixture["reason"], metadata=fixture["metadata"])
        found.append(info)
    return found


def as_call(fixture: dict) -> Answer:
    """As gRPC's client raises it."""
    kind = api.from_grpc_status(grpc.StatusCode[fixture["code"]], fixture["message"]).__class__
    info = next((each for each in details(fixture) if isinstance(each, error_details_pb2.ErrorInfo)), None)
    raised = kind(fixture["message"], details=details(fixture), error_info=info)
    return of_call(raised)


def as_status(fixture: dict) -> Answer:
    """As a failed operation, or a failed queued resource, carries it."""
    status = status_pb2.Status(code=code_pb2.Code.Value(fixture["code"]), message=fixture["message"])
    for each in details(fixture):
        (packed := any_pb2.Any()).Pack(each)
        status.details.append(packed)
    return of_status(status)


def as_json(fixture: dict) -> Answer:
    """As REST answers it."""
    error: dict = {"message": fixture["message"], "status": fixture["code"], "details": []}
    if "quota" in fixture:
        violations = [{"description": fixture["quota"]}]
        error["details"].append({"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": violations})
    if "reason" in fixture:
        info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo"} | {k: fixture[k] for k in ("reason", "metadata")}
        error["details"].append(info)
    return of_json({"error": error}, 400)


@pytest.mark.parametrize("read", [as_call, as_status, as_json])
@pytest.mark.parametrize("fixture", ANSWERS, ids=lambda each: each["message"][:50])
def test_every_carrier_of_a_real_answer_means_the_same(fixture, read):
    if fixture.get("only") and read is not as_call:
        pytest.skip("only gRPC says this")
    found = judge(read(fixture), DOING, "my-project")
    assert type(found).__name__ == fixture["is"]
    assert str(found).startswith(DOING)
    assert fixture.get("way", "") in str(found)
    if "limit" in fixture:
        assert found.limit == fixture["limit"]
    if "permission" in fixture:
        assert found.permission == fixture["permission"]
        assert fixture["role"] in str(found) and "gcloud projects add-iam-policy-binding my-project" in str(found)


@pytest.mark.parametrize("fixture", OPERATIONS, ids=lambda each: each["code"])
def test_operations_of_compute_engine(fixture):
    detail = compute_v1.ErrorDetails(
        error_info=compute_v1.ErrorInfo(reason=fixture.get("reason", ""), metadatas=fixture.get("metadata", {}))
    )
    failed = compute_v1.Errors(code=fixture["code"], message=fixture["message"], error_details=[detail])
    answer = of_compute(compute_v1.Operation(error=compute_v1.Error(errors=[failed])))
    found = judge(answer, DOING, "my-project")
    assert type(found).__name__ == fixture["is"]
    if "limit" in fixture:
        assert found.limit == fixture["limit"]
    if "permission" in fixture:
        assert found.permission == fixture["permission"] and fixture["role"] in str(found)
    assert of_compute(compute_v1.Operation(name="fine")) is None


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
def test_rest_answers_without_a_status_are_told_by_code_and_reason(status, reason, kind):
    body = {"error": {"code": status, "message": "Quota 'CPUS' exceeded", "errors": [{"reason": reason}]}}
    if kind is not errors.NoQuota:
        body["error"]["message"] = "words"
    assert type(judge(of_json(body, status), DOING, "p")) is kind
    raised = api.from_http_status(status, body["error"]["message"], errors=body["error"]["errors"])
    assert type(judge(of_call(raised), DOING, "p")) is kind


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (auth.RefreshError("Reauthentication is needed."), errors.NotSignedIn, "gcloud auth application-default login"),
        (auth.DefaultCredentialsError("Your default credentials were not found. To set up …"), errors.NotSignedIn, ""),
        (auth.TransportError("HTTPSConnectionPool: Failed to resolve 'oauth2.example'"), errors.Unreachable, "resolve"),
        (requests.ConnectionError("Connection refused"), errors.Unreachable, "cannot be reached (Connection refused)"),
        (requests.Timeout("Read timed out."), errors.Unreachable, "timed out"),
        (api.RetryError("too long", api.ServiceUnavailable("down")), errors.Unreachable, "down"),
        (api.RetryError("too long", None), errors.Unreachable, ""),
    ],
)
def test_what_fails_before_google_answers(raised, kind, words):
    found = translate(raised, DOING, "p")
    assert type(found) is kind and words in str(found)
    assert "\n" not in str(found)


def test_a_fault_of_our_own_is_left_alone():
    assert translate(KeyError("name"), DOING, "p") is None
