"""Calls over a real HTTPS server on loopback: who gets in, what a wrong server is told, and what a cut costs."""

import asyncio
import http.server
import os
import re
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import asyncssh
import httpx
import numpy as np
import pytest
from cryptography import x509

from tpuswarm.errors import InputError
from tpuswarm.swarm.anywhere import client, server, transfers, wire
from tpuswarm.swarm.anywhere.certificate import ensure_certificate, fingerprint
from tpuswarm.swarm.anywhere.client import HttpsCalls, NoSwarm
from tpuswarm.swarm.anywhere.invites import Invitation
from tpuswarm.swarm.anywhere.server import MAX_CALLS_OF_A_PERSON, MAX_FAILURES
from tpuswarm.swarm.core.messages import Accepted, Refused
from tpuswarm.swarm.core.values import Identity, Incarnation
from tpuswarm.swarm.processes.effects import Call, Unreachable

WHO = Identity(Incarnation("ada-colab", "a" * 32), 1)
HELLO = Call("coordinator", "hello", ("ada-colab",))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(client, "PART_BYTES", 2**16)
    monkeypatch.setattr(client, "RETRY_PAUSE_S", 0.05)


def test_call_reaches_the_swarm_and_its_answer_returns(head):
    head.answer = lambda call: Accepted()
    assert head.calls_of()(HELLO) == Accepted() and head.calls == [HELLO]


def test_long_payload_and_long_answer_arrive_whole(head):
    array = np.random.default_rng(0).random(2**19, np.float32)
    put = Call("aggregator-0", "put", (WHO, 0, {"array": array}, "d" * 64))
    fetch = Call("aggregator-0", "fetch", (0, "d" * 64))
    head.answer = lambda call: array if call.method == "fetch" else Accepted()
    calls = head.calls_of()
    assert calls(put) == Accepted()
    (sent,) = head.calls
    assert np.array_equal(sent.arguments[2]["array"], array)
    for _ in range(3):
        assert np.array_equal(calls(fetch), array)
    assert len(head.calls) == 2, "a fragment of a version never changes: it is asked for once"


def test_transfer_goes_on_after_a_cut_where_it_stopped(head, monkeypatch):
    array = np.random.default_rng(0).random(2**18, np.float32)
    head.answer = lambda call: array
    calls, seen, cut = head.calls_of(), [], iter([False, False, True, True, False, True])
    real = HttpsCalls._request

    def request(self, method, path, content, seconds, headers=None):
        if "/part/" in path or "/answer/" in path:
            seen.append((path, headers))
            answer = real(self, method, path, content, seconds, headers)
            if next(cut, False):
                raise httpx.ReadError("cut after it arrived")
            return answer
        return real(self, method, path, content, seconds, headers)

    monkeypatch.setattr(HttpsCalls, "_request", request)
    assert calls(Call("aggregator-0", "put", (WHO, 0, {"array": array}, "d" * 64))) is not None
    parts = -(-len(wire.encode(head.calls[0])) // client.PART_BYTES)
    uploaded = [path for path, _ in seen if "/part/" in path]
    assert len(uploaded) == parts + 3
    assert np.array_equal(head.calls[0].arguments[2]["array"], array)
    seen.clear()
    cut = iter([True, True])
    assert np.array_equal(calls(Call("aggregator-0", "fetch", (0, "e" * 64))), array)
    assert seen[0] == seen[1] == seen[2] != seen[3]


def test_call_without_an_answer_is_unreachable(head):
    head.answer = lambda call: Unreachable("aggregator-0")
    calls = head.calls_of()
    with pytest.raises(Unreachable):
        calls(HELLO)
    head.stop()
    with pytest.raises(Unreachable):
        calls(HELLO)
    head.start()
    head.answer = lambda call: Accepted()
    assert calls(HELLO) == Accepted(), "the same connection works after the head's restart"


def test_error_of_one_request_ends_nothing(head):
    def fail(call):
        raise ZeroDivisionError

    head.answer = fail
    calls = head.calls_of()
    assert isinstance(calls(HELLO), Refused)
    head.answer = lambda call: Accepted()
    assert calls(HELLO) == Accepted()


def test_revoked_invite_ends_a_connection_at_its_next_call(head):
    calls = head.calls_of()
    calls(HELLO)
    head.book.revoke("ada")
    with pytest.raises(InputError, match="revoked"):
        calls(HELLO)
    head.calls_of("bob")(HELLO)


def test_expired_invite_names_the_clock(head):
    head.book.invite("ada", seconds=60.0)
    calls = head.calls_of()
    calls(HELLO)
    head.now += 120.0
    with pytest.raises(InputError, match=r"expired at .* by the swarm's clock"):
        calls(HELLO)


def test_wrong_secrets_are_slowed_down_and_keep_nobody_out(head):
    wrong = head.calls_of(secret="00" * 16)
    for _ in range(MAX_FAILURES):
        with pytest.raises(InputError, match="does not know this invite"):
            wrong(HELLO)
    with pytest.raises(Unreachable, match="wait a minute"):
        wrong(HELLO)
    head.calls_of()(HELLO)
    head.now += 61.0
    with pytest.raises(InputError, match="does not know this invite"):
        wrong(HELLO)
    assert len(head.calls) == 1


def test_other_certificate_is_noticed_before_the_secret_is_sent(head, tmp_path):
    (tmp_path / "other").mkdir()
    impostor = _serve(tmp_path / "other", headers={wire.HEADER: str(wire.VERSION)})
    with pytest.raises(InputError, match=r"may be intercepting the connection.*nothing was sent"):
        head.calls_of(address=f"127.0.0.1:{impostor.server_port}")
    assert impostor.seen == [("GET", None)]
    impostor.shutdown()


def test_login_page_of_a_network_is_told_from_a_swarm(tmp_path, monkeypatch):
    portal = _serve(tmp_path)
    invitation = Invitation(f"https://localhost:{portal.server_port}", "", "ada", "00" * 16)
    monkeypatch.setenv("SSL_CERT_FILE", str(portal.certificate))
    monkeypatch.setattr(ssl, "create_default_context", lambda **more: ssl._create_unverified_context())
    with pytest.raises(InputError, match="answers with text/html, status 200, and not as a swarm"):
        HttpsCalls(invitation).connect()
    portal.shutdown()


def test_login_page_without_tls_is_told_from_a_head_that_is_away():
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as portal:
        portal.timeout, thread = 20.0, threading.Thread(target=portal.handle_request)
        thread.start()
        with pytest.raises(InputError, match="speaks no TLS: this network may want you to log in"):
            HttpsCalls(Invitation(f"127.0.0.1:{portal.server_port}", "a" * 64, "ada", "00" * 16)).connect()
        thread.join()


def test_wrong_clock_of_a_member_is_named_and_does_not_matter_to_a_pinned_certificate(head):
    pem = ensure_certificate(head.folder).read_text()
    certificate = x509.load_pem_x509_certificate(pem[pem.index("-----BEGIN CERT") :].encode())
    years = certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year
    assert years == (2000, 2100)
    for words in ("certificate is not yet valid", "certificate has expired"):
        calls = HttpsCalls(Invitation("https://swarm.example.org", "", "ada", "00" * 16))
        why = calls._explain(httpx.ConnectError(f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {words}"))
        assert isinstance(why, InputError) and "is the clock of this machine right?" in str(why)


def test_unknown_certificate_of_a_tunnel_is_refused(tmp_path):
    tunnel = _serve(tmp_path, headers={wire.HEADER: str(wire.VERSION)})
    with pytest.raises(InputError, match=r"certificate of .* is not valid"):
        HttpsCalls(Invitation(f"https://localhost:{tunnel.server_port}", "", "ada", "00" * 16)).connect()
    tunnel.shutdown()


def test_page_of_a_tunnel_without_its_head_ends_no_member(tmp_path):
    tunnel = _serve(tmp_path, headers={wire.HEADER: str(wire.VERSION)})
    mark = fingerprint(tunnel.certificate)
    calls = HttpsCalls(Invitation(f"127.0.0.1:{tunnel.server_port}", mark, "ada", "00" * 16))
    calls.connect()
    with pytest.raises(Unreachable, match="answers with status 501"):
        calls(HELLO)
    tunnel.shutdown()
    (tmp_path / "other").mkdir()
    tunnel = _serve(tmp_path / "other", status=502)
    mark = fingerprint(tunnel.certificate)
    with pytest.raises(NoSwarm, match="does not reach the head"):
        HttpsCalls(Invitation(f"127.0.0.1:{tunnel.server_port}", mark, "ada", "00" * 16)).connect()
    tunnel.shutdown()


def test_closed_port_is_no_swarm_at_the_moment(head):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(NoSwarm, match="nothing answers at"):
            head.calls_of(address=f"127.0.0.1:{closed.getsockname()[1]}")


def test_member_with_another_version_of_the_protocol_is_told(head, monkeypatch):
    monkeypatch.setattr(wire, "VERSION", 2)
    calls = head.calls_of()
    monkeypatch.setattr(wire, "VERSION", 1)
    with pytest.raises(InputError, match="version 1 of the protocol"):
        calls(HELLO)


def test_requests_that_are_too_long_or_no_messages_are_refused(head):
    with httpx.Client(verify=False, base_url=f"https://127.0.0.1:{head.port}") as raw:
        invitation = head.book.invite("ada")
        raw.headers.update({"authorization": f"Bearer ada.{invitation.secret}", wire.HEADER: str(wire.VERSION)})
        statuses = [
            raw.post("/call", content=content).status_code
            for content in (b"", b"{}", os.urandom(100), wire.encode("text"), wire.encode(Call("a", "b", None)))
        ]
        assert statuses == [400] * 5
        assert raw.post("/call", content=bytes(transfers.PART_BYTES + 1)).status_code == 413
        assert raw.post("/call", headers={wire.CONTENT: "0" * 64}).status_code == 409
        assert raw.post("/part/..%2f..%2fx?start=0", content=b"x").status_code in (400, 404)
        assert raw.post(f"/part/{'0' * 64}?start=-1", content=b"x").status_code == 400
        assert raw.get(f"/answer/{'0' * 64}").status_code == 404
        part, digest = bytes(transfers.PART_BYTES), "1" * 64
        sizes = [raw.post(f"/part/{digest}?start={n * len(part)}", content=part) for n in range(21)]
        assert sizes[-1].status_code == 413
        raw.headers["authorization"] = "Bearer ada."
        for path in ("/call", f"/part/{digest}?start=0"):
            assert raw.post(path, content=b"x").status_code == 401
        assert raw.get(f"/answer/{digest}").status_code == 401
    assert not head.calls


def test_silent_connection_is_closed_and_a_busy_one_stays(head, monkeypatch):
    monkeypatch.setattr(server, "MAX_IDLE_CONNECTION_S", 0.5)
    context = ssl._create_unverified_context()
    with socket.create_connection(("127.0.0.1", head.port)) as raw, context.wrap_socket(raw) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\nx-slow: ")
        head.answer = lambda call: time.sleep(1.5)
        head.calls_of()(HELLO)
        silent.settimeout(5.0)
        assert silent.recv(1) == b""


def test_slow_body_is_given_up_and_asked_for_again(head, monkeypatch):
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.2)
    invitation = head.book.invite("ada")
    lines = ["POST /call HTTP/1.1", "host: x", f"authorization: Bearer ada.{invitation.secret}",
             f"{wire.HEADER}: {wire.VERSION}", "content-length: 9", "", "x"]  # fmt: skip
    context = ssl._create_unverified_context()
    with socket.create_connection(("127.0.0.1", head.port)) as raw, context.wrap_socket(raw) as slow:
        slow.sendall("\r\n".join(lines).encode())
        slow.settimeout(5.0)
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_person_with_many_slow_calls_keeps_nobody_else_out(head):
    """Nor do their messages fill the memory before it is their turn."""
    array = np.zeros(2**15, np.float32)
    goes_on, taken = threading.Event(), []
    head.answer = lambda call: goes_on.wait(20.0) and None if call.method == "put" else Accepted()
    real = transfers.Uploads.take

    def take(self, person, digest):
        taken.append(digest)
        return real(self, person, digest)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(64) as pool:
        patch.setattr(transfers.Uploads, "take", take)
        ada, bob = [head.calls_of() for _ in range(8)], head.calls_of("bob")
        puts = [
            pool.submit(ada[number % 8], Call("aggregator-0", "put", (WHO, number, {"array": array}, "d" * 64)))
            for number in range(2 * MAX_CALLS_OF_A_PERSON)
        ]
        try:
            while len(head.calls) < MAX_CALLS_OF_A_PERSON:
                time.sleep(0.01)
            assert bob(Call("coordinator", "hello", ("bob-home",))) == Accepted()
            assert len(taken) == MAX_CALLS_OF_A_PERSON
        finally:
            goes_on.set()
        assert [put.result() for put in puts] == [None] * len(puts)


def test_damaged_upload_is_asked_for_again(head):
    uploads = transfers.Uploads(head.folder / "u", 100)
    assert uploads.add("ada", "0" * 64, 0, b"damaged") == 7
    assert uploads.take("ada", "0" * 64) is None and uploads.add("ada", "0" * 64, 0, b"") == 0


def test_answers_give_room_to_newer_ones(tmp_path):
    answers = transfers.Answers(tmp_path, 100)
    first = answers.keep(b"a" * 60, "first")
    second = answers.keep(b"b" * 60, "second")
    assert answers.path(first) and answers.path(second)
    third = answers.keep(b"c" * 60)
    assert answers.path(first) is None and answers.known("first") is None
    assert answers.known("second") == (second, 60) and answers.path(third)
    assert len(list(tmp_path.iterdir())) == 2


def _serve(folder, headers=None, status=200):
    """Serve web pages by HTTPS, with a certificate of its own."""
    seen = []

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.command, self.headers.get("authorization")))
            self.send_response(status)
            for name, value in {"content-type": "text/html; charset=utf-8", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"hi")

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.certificate = ensure_certificate(folder)
    context.load_cert_chain(server.certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.seen = seen
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_calls_pass_an_http_proxy(head, monkeypatch):
    seen = []

    class Proxy(socketserver.StreamRequestHandler):
        def handle(self):
            target = self.rfile.readline().split()[1].decode()
            while self.rfile.readline().strip():
                pass
            seen.append(target)
            name, _, port = target.rpartition(":")
            with socket.create_connection((name, int(port))) as other:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=_pipe, args=(other, self.connection))
                back.start()
                _pipe(self.connection, other)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.server_address[1]}")
        monkeypatch.setenv("NO_PROXY", "")
        head.answer = lambda call: Accepted()
        with closing(head.calls_of()) as calls:
            assert calls(HELLO) == Accepted()
        proxy.shutdown()
    assert set(seen) == {f"127.0.0.1:{head.port}"}


def test_calls_pass_a_reverse_tunnel_of_ssh(head, tmp_path):
    head.answer = lambda call: Accepted()
    with _ssh_server(tmp_path) as (port, key):
        tunnel = subprocess.Popen(
            ["ssh", "-F", "none", "-N", "-v", "-i", key, "-p", str(port), "-o", "StrictHostKeyChecking=no",
             "-o", "UserKnownHostsFile=/dev/null", "-R", f"127.0.0.1:0:127.0.0.1:{head.port}", "127.0.0.1"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            lines = iter(tunnel.stderr.readline, "")
            public = next(match[1] for line in lines if (match := re.search(r"Allocated port (\d+)", line)))
            with closing(head.calls_of(address=f"127.0.0.1:{public}")) as calls:
                assert calls(HELLO) == Accepted()
        finally:
            tunnel.kill()
            tunnel.communicate()


@contextmanager
def _ssh_server(folder):
    """Yield the port of an SSH server that lets anybody forward, and a key for it."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    path = folder / "key"
    path.touch(0o600)
    path.write_bytes(key.export_private_key())

    class Server(asyncssh.SSHServer):
        def begin_auth(self, username):
            return False

        def server_requested(self, host, port):
            return True

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def listen():
        return await asyncssh.listen("127.0.0.1", 0, server_host_keys=[key], server_factory=Server)

    server = asyncio.run_coroutine_threadsafe(listen(), loop).result()
    try:
        yield server.get_port(), str(path)
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _pipe(source, target):
    while part := source.recv(65536):
        target.sendall(part)
    target.shutdown(socket.SHUT_WR)
