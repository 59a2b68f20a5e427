"""How calls are made: credentials are found late, questions asked again, changes never, and nothing waits for ever."""

import json
import os
import socket
import stat
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from google.api_core import exceptions as api
from google.auth.credentials import Credentials

from tests.cloud.google.test_provider import spec
from tpuswarm.cloud.errors import NotSignedIn, Unreachable
from tpuswarm.cloud.google import access as module
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.google.provider import Google
from tpuswarm.cloud.protocol import Machine, VmSpec

LOCAL = Endpoints("127.0.0.1:1", "http://127.0.0.1:1", "token")


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    for name in ("access", "provider"):
        monkeypatch.setattr(f"tpuswarm.cloud.google.{name}.SECONDS", 0.2)


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """A user who has never signed in anywhere; the folder of gcloud."""
    for name in list(os.environ):
        if name.startswith(("GOOGLE_", "CLOUDSDK_", "GCE_METADATA")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "gcloud" / "configurations").mkdir(parents=True)
    return tmp_path / "gcloud"


def failing(*errors):
    """A call that raises each of them in turn and then answers; and how often it was made."""
    calls = []

    def call():
        calls.append(1)
        if len(calls) <= len(errors):
            raise errors[len(calls) - 1]
        return "answer"

    return call, calls


def test_a_question_is_asked_again_and_a_change_is_not():
    call, calls = failing(api.ServiceUnavailable("down"))
    assert Access("p", LOCAL).ask("asking", call) == "answer" and len(calls) == 2
    call, calls = failing(api.ServiceUnavailable("down"))
    with pytest.raises(Unreachable, match="changing: down"):
        Access("p", LOCAL).change("changing", call)
    assert len(calls) == 1


def test_an_answer_is_not_asked_for_again():
    call, calls = failing(api.NotFound("gone"))
    with pytest.raises(module.CloudError, match="asking: gone"):
        Access("p", LOCAL).ask("asking", call)
    assert len(calls) == 1


def test_patience_ends(hasty):
    call, calls = failing(*[api.ServiceUnavailable("down")] * 100)
    with pytest.raises(Unreachable, match="down"):
        Access("p", LOCAL).ask("asking", call)
    assert 1 <= len(calls) < 100


def test_a_fault_of_ours_is_not_dressed_up():
    call, _ = failing(KeyError("ours"))
    with pytest.raises(KeyError):
        Access("p", LOCAL).ask("asking", call)


NODE = Machine("n1", "us-central1-f", "tpu", "v2-8", "ready", "READY", request="n1")
VM = Machine("head", "us-central1-f", "vm", "e2-small", "ready", "RUNNING")
HEAD = VmSpec("head", "us-central1-f", "e2-small", "f", "head", "debian-cloud/debian-12", 10)
VERBS = {
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
    "delete object": lambda google: google.bucket("b").delete("o"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_never_answers_keeps_nobody_waiting(verb, hasty):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        port = silent.getsockname()[1]
        google = Google(Access("p", Endpoints(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", "token")))
        with pytest.raises(Unreachable):
            VERBS[verb](google)


@pytest.mark.parametrize("verb", ["machines", "create vm", "read"])
def test_without_a_network_the_sentence_says_that_google_cannot_be_reached(verb, hasty):
    with pytest.raises(Unreachable) as raised:
        VERBS[verb](Google(Access("p", LOCAL)))
    assert "\n" not in str(raised.value)


def test_who_never_signed_in_is_told_how(nobody):
    google = Google(Access("p"))
    assert google.project == "p"
    with pytest.raises(NotSignedIn, match="gcloud auth application-default login"):
        google.types("us-central1-f")


def test_application_default_credentials_are_billed_to_the_project(nobody):
    mine = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "r"}
    (nobody / "application_default_credentials.json").write_text(json.dumps(mine))
    found = Access("p").credentials
    assert (found.refresh_token, found.quota_project_id) == ("r", "p")
    (nobody / "application_default_credentials.json").write_text(json.dumps({**mine, "quota_project_id": "q"}))
    assert Access("p").credentials.quota_project_id == "q"


@pytest.mark.parametrize(("code", "token"), [(0, "t1"), (1, None)])
def test_whoever_signed_in_to_gcloud_alone_needs_no_more(nobody, tmp_path, monkeypatch, code, token):
    (nobody / "configurations" / "config_default").write_text("[core]\naccount = me@example.com\n")
    said = {"credential": {"access_token": "t1", "token_expiry": "2099-01-01T00:00:00Z"}}
    gcloud = tmp_path / "gcloud-program"
    gcloud.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\necho 'You are no longer signed in' >&2\nexit {code}\n")
    gcloud.chmod(gcloud.stat().st_mode | stat.S_IXUSR)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "gcloud").symlink_to(gcloud)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    access = Access("p")
    if token is None:
        with pytest.raises(NotSignedIn, match="no longer signed in"):
            access.ask("asking", lambda: None)
    else:
        assert access.ask("asking", lambda: access.credentials.token) == token
        assert access.credentials.valid


def test_a_token_that_google_takes_for_ended_is_renewed_once():
    """As where this computer's clock is behind: by it the token holds for hours."""
    tokens = iter(["old", "new"])

    class Renewed(Credentials):
        def refresh(self, request: object) -> None:
            self.token = next(tokens)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = self.headers["Authorization"] == "Bearer new"
            body = b'{"is": "there"}' if good else b'{"error": {"status": "UNAUTHENTICATED", "message": "ended"}}'
            self.send_response(200 if good else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *about: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        access = Access("p", LOCAL)
        access.credentials = Renewed()
        assert access.get("asking", f"http://127.0.0.1:{server.server_port}/it") == {"is": "there"}
        access.credentials.token = "old"
        tokens = iter(["older"])
        with pytest.raises(NotSignedIn, match="ended; sign in"):
            access.get("asking", f"http://127.0.0.1:{server.server_port}/it")
        server.shutdown()
