"""Addresses of a local cloud, for Google's own clients."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import grpc
    from google.auth.credentials import Credentials


LOCAL_ACCOUNT = "you@example.com"
"""The owner of all projects of a local cloud."""


@dataclass(frozen=True)
class Endpoints:
    """A local cloud on loopback."""

    rpc: str
    """HOST:PORT of the TPU API (gRPC, without TLS)."""
    http: str
    """http://HOST:PORT of all REST APIs: their paths tell them apart."""
    token: str = field(repr=False)
    """Required in every request."""

    def credentials(self) -> "Credentials":
        """Return credentials for REST clients."""
        return token_credentials(self.token)

    def channel(self) -> "grpc.Channel":
        """Return a channel for `TpuClient(transport=TpuGrpcTransport(channel=endpoints.channel()))`."""
        import grpc

        # gRPC sends credentials over TLS only, so the token is sent as a header.
        return grpc.intercept_channel(grpc.insecure_channel(self.rpc), _bearer(self.token))


def token_credentials(token: str) -> "Credentials":
    """Return credentials with a token that is never renewed."""
    # Not google.oauth2's: it imports cryptography, which takes a sixth of `list`.
    from google.auth.credentials import Credentials

    class Token(Credentials):
        def refresh(self, request: object) -> None:
            """The token never changes."""

    credentials = Token()  # type: ignore[no-untyped-call]
    credentials.token = token
    return credentials


class _Details(NamedTuple):
    """Details of a gRPC call, with our headers."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str]]
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


def _bearer(token: str) -> Any:
    import grpc

    class Bearer(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            headers = [*(details.metadata or ()), ("authorization", f"Bearer {token}")]
            call = _Details(details.method, details.timeout, headers, details.credentials, details.wait_for_ready, None)
            return continuation(call, request)

    return Bearer()
