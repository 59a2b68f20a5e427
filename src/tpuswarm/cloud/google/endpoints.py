"""Where Google's clients find the APIs: at Google's own addresses, or at a local cloud's."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import grpc
    from google.auth.credentials import Credentials


@dataclass(frozen=True)
class Endpoints:
    """A local cloud on loopback. Where None stands in the place of one, it is Google's."""

    rpc: str
    """HOST:PORT of the TPU API (gRPC, without TLS)."""
    http: str
    """http://HOST:PORT of all REST APIs: their paths tell them apart."""
    token: str = field(repr=False)
    """What every request must carry."""

    def credentials(self) -> "Credentials":
        """For clients that speak REST."""
        # Not google.oauth2's: importing that brings all of cryptography, a sixth of what `list` takes.
        from google.auth.credentials import Credentials

        class Token(Credentials):
            def refresh(self, request: object) -> None:
                """There is no other."""

        found = Token()  # type: ignore[no-untyped-call]
        found.token = self.token
        return found

    def channel(self) -> "grpc.Channel":
        """For the TPU client: `TpuClient(transport=TpuGrpcTransport(channel=endpoints.channel()))`."""
        import grpc

        # gRPC sends credentials over TLS only; the token goes along as what it becomes there, a header.
        return grpc.intercept_channel(grpc.insecure_channel(self.rpc), _bearer(self.token))


class _Details(NamedTuple):
    """What gRPC wants to know of a call, with headers of ours."""

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
