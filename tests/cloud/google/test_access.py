"""Calls to Google: retries, timeouts and credentials."""

import json
import os
import socket
from collections.abc import Mapping
from functools import partial
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.api_core import exceptions as api
from google.auth.credentials import Credentials

from tests.cloud.google.conftest import spec
from tests.web import serve_web
from tpuswarm.cloud.errors import CloudError, Denied, NotFound, NotSignedIn, Unreachable
from tpuswarm.cloud.google import access, buckets
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.protocol import Machine, VmSpec
from tpuswarm.train.storage import bucket

LOCAL = Endpoints("127.0.0.1:1", "http://127.0.0.1:1", "token")


@pytest.fixture
def short_timeouts(monkeypatch):
    monkeypatch.setattr(access, "RETRY_WINDOW_S", 0.1)
    monkeypatch.setattr(buckets, "RETRY_WINDOW_S", 0.1)
    monkeypatch.setitem(bucket._ONCE, "timeout", (0.05, 0.05))
    monkeypatch.setattr(access, "MIN_PAUSE_S", 0.02)
    for module in ("access", "provider"):
        monkeypatch.setattr(f"tpuswarm.cloud.google.{module}.REQUEST_TIMEOUT_S", 0.05)


@pytest.fixture
def gcloud_folder(monkeypatch, tmp_path):
    """The folder of gcloud of a user who has never signed in."""
    for name in list(os.environ):
        if name.startswith(("GOOGLE_", "CLOUDSDK_", "GCE_METADATA")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "gcloud" / "configurations").mkdir(parents=True)
    return tmp_path / "gcloud"


@pytest.mark.parametrize(
    ("method", "errors", "raised", "calls"),
    [
        ("call_with_retries", [api.ServiceUnavailable("down")], None, 2),
        ("call_once", [api.ServiceUnavailable("down")], Unreachable, 1),
        ("call_with_retries", [api.NotFound("down")], CloudError, 1),
        ("call_with_retries", [KeyError("a fault of our own")], KeyError, 1),
        ("call_with_retries", [api.ServiceUnavailable("down")] * 100, Unreachable, range(2, 100)),
    ],
)
def test_only_transient_failures_of_reads_are_retried(short_timeouts, monkeypatch, method, errors, raised, calls):
    monkeypatch.setattr(access, "RETRY_WINDOW_S", 60.0 if len(errors) == 1 else 1.0)
    answers = Mock(side_effect=[*errors, "answer"])
    call = partial(getattr(Access("p", LOCAL), method), "reading", answers)
    if raised:
        with pytest.raises(raised, match="fault of our own" if raised is KeyError else "reading: down"):
            call()
    else:
        assert call() == "answer"
    assert answers.call_count in (calls if isinstance(calls, range) else [calls])


NODE = Machine("n1", "us-central1-f", "tpu", "v2-8", "ready", "READY", request="n1")
VM = Machine("head", "us-central1-f", "vm", "e2-small", "ready", "RUNNING")
HEAD = VmSpec("head", "us-central1-f", "e2-small", "f", "head", "debian-cloud/debian-12", 10)
CALLS = {
    "create": lambda google: google.create(spec("n1")),
    "create queued": lambda google: google.create(spec("n1", how="queued")),
    "create vm": lambda google: google.create(HEAD),
    "delete": lambda google: google.delete(NODE),
    "delete vm": lambda google: google.delete(VM),
    "stop": lambda google: google.stop(NODE),
    "stop vm": lambda google: google.stop(VM),
    "start": lambda google: google.start(NODE),
    "start vm": lambda google: google.start(VM),
    "machines": lambda google: google.machines(["us-central1-f"]),
    "outcome": lambda google: google.outcome("projects/p/locations/us-central1-f/operations/o"),
    "outcome vm": lambda google: google.outcome("projects/p/zones/us-central1-f/operations/o"),
    "types": lambda google: google.types("us-central1-f"),
    "runtimes": lambda google: google.runtimes("us-central1-f"),
    "set_metadata": lambda google: google.set_metadata(NODE, {}),
    "set_metadata vm": lambda google: google.set_metadata(VM, {}),
    "guest_attributes": lambda google: google.guest_attributes(NODE, 0, "hostkeys/"),
    "guest_attributes vm": lambda google: google.guest_attributes(VM, 0, "hostkeys/"),
    "read": lambda google: google.bucket("b").read("o"),
    "write": lambda google: google.bucket("b").write("o", b"", 0),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_to_a_silent_server_time_out(call, short_timeouts):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        port = silent.getsockname()[1]
        google = GoogleProvider(Access("p", Endpoints(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", "token")))
        with pytest.raises(Unreachable):
            CALLS[call](google)


@pytest.mark.parametrize("call", ["machines", "create vm", "read"])
def test_call_without_network_fails_in_one_sentence(call, short_timeouts):
    with pytest.raises(Unreachable) as raised:
        CALLS[call](GoogleProvider(Access("p", LOCAL)))
    assert "\n" not in str(raised.value)


def test_user_who_never_signed_in_learns_how(gcloud_folder):
    google = GoogleProvider(Access("p"))
    assert google.project == "p"
    with pytest.raises(NotSignedIn, match="gcloud auth application-default login"):
        google.types("us-central1-f")


def test_application_default_credentials_bill_the_project(gcloud_folder):
    mine = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "r"}
    (gcloud_folder / "application_default_credentials.json").write_text(json.dumps(mine))
    found = Access("p").credentials
    assert (found.refresh_token, found.quota_project_id) == ("r", "p")
    (gcloud_folder / "application_default_credentials.json").write_text(json.dumps({**mine, "quota_project_id": "q"}))
    assert Access("p").credentials.quota_project_id == "q"


@pytest.mark.parametrize("is_signed_in", [True, False])
def test_sign_in_to_gcloud_alone_is_enough(gcloud_folder, tmp_path, monkeypatch, is_signed_in):
    (gcloud_folder / "configurations" / "config_default").write_text("[core]\naccount = me@example.com\n")
    credential = {"credential": {"access_token": "t1", "token_expiry": "2099-01-01T00:00:00Z"}}
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    answer = f"echo '{json.dumps(credential)}'" if is_signed_in else "echo 'You are no longer signed in' >&2; exit 1"
    gcloud.write_text(f"#!/bin/sh\n{answer}\n")
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gcloud.parent}:/usr/bin:/bin")
    google = Access("p")
    if is_signed_in:
        assert google.call_with_retries("asking", lambda: google.credentials.token) == "t1" and google.credentials.valid
    else:
        with pytest.raises(NotSignedIn, match="no longer signed in"):
            google.call_with_retries("asking", lambda: None)


def test_rejected_token_is_renewed_once():
    """A token may look valid for hours if this computer's clock is behind."""
    tokens = iter(["old", "new"])

    class Renewed(Credentials):
        def refresh(self, request: object) -> None:
            self.token = next(tokens)

    def answer(path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        if headers["Authorization"] == "Bearer new":
            return 200, b'{"is": "there"}'
        return 401, b'{"error": {"status": "UNAUTHENTICATED", "message": "ended"}}'

    with serve_web(answer) as host:
        google = Access("p", LOCAL)
        google.credentials = Renewed()
        assert google.get("asking", f"http://{host}/it") == {"is": "there"}
        google.credentials.token = "old"
        tokens = iter(["older"])
        with pytest.raises(NotSignedIn, match="ended; sign in"):
            google.get("asking", f"http://{host}/it")


ACCOUNT = "robot@other-project.iam.gserviceaccount.com"


@pytest.fixture
def expired_key(gcloud_folder, tmp_path, monkeypatch):
    """The file of a service account's key, named by GOOGLE_APPLICATION_CREDENTIALS, that Google does not take."""
    private = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    refusal = b'{"error": "invalid_grant", "error_description": "Invalid JWT Signature."}'
    with serve_web(lambda path, headers: (400, refusal)) as host:
        about = {"type": "service_account", "client_email": ACCOUNT, "token_uri": f"http://{host}/token"}
        path = tmp_path / "key.json"
        path.write_text(json.dumps({**about, "private_key": private.decode(), "private_key_id": "k"}))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        bucket.connect.cache_clear()
        yield path
        bucket.connect.cache_clear()


def test_expired_key_is_named_with_its_variable(expired_key):
    place = rf"; the credentials of {ACCOUNT} are from {expired_key}, which GOOGLE_APPLICATION_CREDENTIALS names; "
    way_out = r"replace that file, or `unset GOOGLE_APPLICATION_CREDENTIALS` and sign in with `gcloud auth application-"
    with pytest.raises(NotSignedIn, match=rf"\(invalid_grant: Invalid JWT Signature\){place}{way_out}"):
        GoogleProvider(Access("p")).types("us-central1-f")
    with pytest.raises(bucket.BucketFailed, match=f"Invalid JWT Signature.*{place}{way_out}"):
        bucket.Bucket("gs://mine/run").read("o")
    expired_key.write_text(expired_key.read_text()[:100])
    with pytest.raises(NotSignedIn, match=f"the credentials are from {expired_key}, which .*; {way_out}"):
        GoogleProvider(Access("p")).types("us-central1-f")


def test_wrong_account_and_project_are_named_with_their_origin(expired_key, monkeypatch):
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "mistyped")
    google = Access()
    google.credentials = Mock(valid=True)
    origin = "; project mistyped is from the variable GOOGLE_CLOUD_PROJECT; "
    with pytest.raises(Denied, match=f"of {ACCOUNT} are from {expired_key}, .*{origin}.*=serviceAccount:{ACCOUNT} "):
        google.call_once("asking", Mock(side_effect=api.Forbidden("Permission 'tpu.nodes.list' denied")))
    with pytest.raises(NotFound, match=f"{origin}`gcloud projects list` names yours"):
        google.call_once("asking", Mock(side_effect=api.NotFound("Resource 'projects/mistyped' was not found")))
