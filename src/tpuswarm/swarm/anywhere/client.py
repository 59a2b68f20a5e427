"""Call a swarm's processes by HTTPS, as a member that dialled in."""

import hashlib
import hmac
import ssl
import time
from collections.abc import Mapping
from typing import Any

import httpx

from tpuswarm.errors import InputError, first_line
from tpuswarm.swarm.anywhere import wire
from tpuswarm.swarm.anywhere.certificate import fingerprint_of
from tpuswarm.swarm.anywhere.invites import Invitation
from tpuswarm.swarm.anywhere.transfers import PART_BYTES
from tpuswarm.swarm.processes.effects import Call, Unreachable

CONNECT_TIMEOUT_S, HEARTBEAT_TIMEOUT_S, CALL_TIMEOUT_S = 10.0, 20.0, 120.0
"""Longest silence of the other side: while connecting, in a heartbeat, and in any other call. A transfer that moves may
take as long as it needs."""
PART_TIMEOUT_S = 60.0
"""Longest silence within a part of a message: several parts may share a slow link, or it is cut for half a minute."""
MAX_RETRY_S, RETRY_PAUSE_S = 300.0, 1.0
"""A transfer without progress for so long is given up; the caller begins it again."""
MAX_CONNECTIONS = 12
"""Room for the parts that travel at a time, a heartbeat and a report."""


class NoSwarm(Exception):
    """The swarm's head cannot be reached at the moment."""


class _Retries:
    """Counts how long a transfer has made no progress."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def succeeded(self) -> None:
        self._since = time.monotonic()

    def failed(self, error: Exception) -> None:
        """Wait, or raise the error after too long a time without progress."""
        if time.monotonic() - self._since > MAX_RETRY_S:
            raise error
        time.sleep(RETRY_PAUSE_S)


class HttpsCalls:
    """Makes calls to the processes of one run. Threads may share it."""

    def __init__(self, invitation: Invitation):
        self._invitation = invitation
        self._client: httpx.Client | None = None
        address = invitation.address
        self._url = address if address.startswith("https://") else f"https://{address}"

    def connect(self) -> None:
        """Find the server, and see that it is the one that the invite names, before any secret is sent.

        Raise InputError if it is another one or no swarm, NoSwarm if nothing answers.
        """
        context = self._verified_context()
        self._client = httpx.Client(
            base_url=self._url,
            verify=context,
            headers={
                "authorization": f"Bearer {self._invitation.person}.{self._invitation.secret}",
                wire.HEADER: str(wire.VERSION),
            },
            timeout=httpx.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
        )

    def close(self) -> None:
        """End all connections."""
        if self._client:
            self._client.close()

    def __call__(self, call: Call) -> Any:
        """Return the answer, or raise Unreachable. Raise InputError if the swarm does not let this member in."""
        content = wire.encode(call)
        seconds = HEARTBEAT_TIMEOUT_S if call.method == "beat" else CALL_TIMEOUT_S
        try:
            if len(content) <= PART_BYTES:
                response = self._request("POST", "/call", content, seconds)
            else:
                digest = self._upload(content)
                response = self._request("POST", "/call", b"", seconds, {wire.CONTENT: digest})
            if digest := response.headers.get(wire.CONTENT):
                return wire.decode(self._download(digest, int(response.headers[wire.SIZE])))
            return wire.decode(response.content)
        except httpx.HTTPError as error:
            raise Unreachable(f"{call.address}: {first_line(error)}") from error
        except wire.Malformed as error:
            raise Unreachable(f"{call.address}: the answer is damaged ({error})") from error

    def _request(
        self, method: str, path: str, content: bytes, seconds: float, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Return a successful response. Raise InputError, Unreachable, or httpx.HTTPError."""
        assert self._client is not None
        timeout = httpx.Timeout(seconds, connect=CONNECT_TIMEOUT_S)
        response = self._client.request(method, path, content=content, timeout=timeout, headers=headers)
        if wire.HEADER not in response.headers:  # a tunnel answers for a head that is away
            raise Unreachable(f"{self._invitation.address} answers with status {response.status_code}")
        if response.status_code in (400, 401, 413):
            raise InputError(response.text)
        if response.status_code >= 300:
            raise Unreachable(response.text)
        return response

    def _upload(self, content: bytes) -> str:
        """Send a message in parts; return its digest. A cut repeats the part that it hit."""
        digest, sent, retries = hashlib.sha256(content).hexdigest(), 0, _Retries()
        while sent < len(content):
            part = content[sent : sent + PART_BYTES]
            try:
                sent = int(self._request("POST", f"/part/{digest}?start={sent}", part, PART_TIMEOUT_S).text)
                retries.succeeded()
            except httpx.HTTPError as error:
                retries.failed(error)
        return digest

    def _download(self, digest: str, size: int) -> bytes:
        """Fetch an answer in parts. A cut repeats the part that it hit."""
        content, retries = bytearray(), _Retries()
        while len(content) < size:
            last = min(size, len(content) + PART_BYTES) - 1
            try:
                part = self._request(
                    "GET", f"/answer/{digest}", b"", PART_TIMEOUT_S, {"range": f"bytes={len(content)}-{last}"}
                )
                content += part.content
                retries.succeeded()
            except httpx.HTTPError as error:
                retries.failed(error)
        if hashlib.sha256(content).hexdigest() != digest:
            raise Unreachable("an answer was damaged on its way")
        return bytes(content)

    def _verified_context(self) -> ssl.SSLContext:
        """Return a context that trusts the invite's certificate alone, or the usual authorities for https://."""
        context = ssl.create_default_context()
        if self._invitation.fingerprint:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            probe = httpx.Client(verify=context, timeout=CONNECT_TIMEOUT_S)
            with probe, probe.stream("GET", self._url) as answer:
                stream = answer.extensions["network_stream"].get_extra_info("ssl_object")
                der = stream.getpeercert(True) if stream else b""
                answer.read()
        except httpx.HTTPError as error:
            raise self._explain(error) from error
        if self._invitation.fingerprint:
            found = fingerprint_of(der)
            if not hmac.compare_digest(found, self._invitation.fingerprint):
                raise InputError(
                    f"the server at {self._invitation.address} has the certificate {found[:16]}…, the invite names "
                    f"{self._invitation.fingerprint[:16]}…: somebody between here and there may be intercepting the "
                    "connection, or the swarm has a new certificate; nothing was sent; ask for a new invite"
                )
            context = ssl.create_default_context(cadata=ssl.DER_cert_to_PEM_cert(der))
            context.check_hostname = False  # the certificate itself is known
        self._require_swarm(answer)
        return context

    def _explain(self, error: httpx.HTTPError) -> Exception:
        text = first_line(error)
        if "certificate" in text.lower():
            clock = " (is the clock of this machine right?)" if "not yet valid" in text or "expired" in text else ""
            return InputError(f"the certificate of {self._invitation.address} is not valid: {text}{clock}")
        if "WRONG_VERSION_NUMBER" in text:
            return InputError(
                f"what answers at {self._invitation.address} speaks no TLS: this network may want you to log in first, "
                "or the invite's address is another program's"
            )
        return NoSwarm(f"nothing answers at {self._invitation.address} ({text or type(error).__name__})")

    def _require_swarm(self, response: httpx.Response) -> None:
        if wire.HEADER not in response.headers:
            if response.status_code >= 500:
                raise NoSwarm(f"the tunnel at {self._invitation.address} does not reach the head")
            kind = response.headers.get("content-type", "something unknown").partition(";")[0]
            raise InputError(
                f"{self._invitation.address} answers with {kind}, status {response.status_code}, and not as a swarm: "
                "this network may want you to log in first, or the tunnel to the head has ended"
            )
