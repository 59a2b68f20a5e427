"""Access to one project: credentials and clients, made when they are first needed, and how each call is made."""

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.google.answers import of_json, translate
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.google.failures import judge
from tpuswarm.cloud.google.settings import find_project

if TYPE_CHECKING:
    from google.auth.transport.requests import AuthorizedSession
    from google.cloud import storage, tpu_v2

SECONDS = 30.0
"""That an answer may take. Google's clients wait for ever unless they are told."""
PATIENCE = 10.0
"""Seconds for which a question is asked again while it is not answered."""
TRANSIENT = (429, 500, 502, 503, 504)
"""REST answers after which the same question is asked again."""

T = TypeVar("T")


class Access:
    """A project at Google, or at `endpoints`. Nothing is read and nobody asked before the first call."""

    def __init__(self, project: str | None = None, endpoints: Endpoints | None = None):
        self._given = project
        self.endpoints = endpoints
        self._lock = threading.Lock()
        self._compute: dict[str, Any] = {}

    @functools.cached_property
    def project(self) -> str:
        """The project's id, from the places of `settings`. Raises InputError where none is named."""
        return find_project(self._given)

    @functools.cached_property
    def credentials(self) -> Any:
        """Application default credentials, else those of gcloud itself. Raises NotSignedIn."""
        if self.endpoints:
            return self.endpoints.credentials()
        from tpuswarm.cloud.google.signed_in import credentials

        try:
            return credentials(self.project)
        except Exception as error:
            raise translate(error, "signing in", self.project) or error from error

    @functools.cached_property
    def tpu(self) -> "tpu_v2.TpuClient":
        """The client of the TPU API."""
        from google.cloud.tpu_v2 import TpuClient
        from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

        if self.endpoints:
            return TpuClient(transport=TpuGrpcTransport(channel=self.endpoints.channel()))
        return TpuClient(credentials=self.credentials)

    @functools.cached_property
    def storage(self) -> "storage.Client":
        """The client of Cloud Storage."""
        from google.cloud.storage import Client

        options = {"api_endpoint": self.endpoints.http} if self.endpoints else None
        return Client(project=self.project, credentials=self.credentials, client_options=options)

    @functools.cached_property
    def session(self) -> "AuthorizedSession":
        """For APIs without a client of their own."""
        from google.auth.transport.requests import AuthorizedSession

        return AuthorizedSession(self.credentials, refresh_timeout=SECONDS)  # type: ignore[no-untyped-call]

    def compute(self, name: str) -> Any:
        """A client of Compute Engine, such as `Instances`. Importing them takes longer than most calls."""
        with self._lock:
            if name not in self._compute:
                from google.cloud import compute_v1

                options = {"api_endpoint": self.endpoints.http} if self.endpoints else None
                client = getattr(compute_v1, f"{name}Client")
                self._compute[name] = client(credentials=self.credentials, client_options=options)
            return self._compute[name]

    def ask(self, doing: str, call: Callable[[], T]) -> T:
        """The answer to a question: asked again for PATIENCE seconds while Google is not reached or fails itself."""
        from google.api_core import retry

        patient = retry.Retry(predicate=_transient, initial=0.5, maximum=4.0, timeout=PATIENCE)
        return self._call(doing, patient(call))

    def change(self, doing: str, call: Callable[[], T]) -> T:
        """What comes of a call that changes something.

        It is made once: where the answer is lost, what was done shows in what is there, and asking blindly again may
        do it twice.
        """
        return self._call(doing, call)

    def get(self, doing: str, url: str, **query: str) -> dict[str, Any]:
        """The JSON that a REST API answers at `url`."""
        return self.ask(doing, lambda: self._rest("GET", url, query))

    def post(self, doing: str, url: str) -> dict[str, Any]:
        """The JSON of a REST API's answer to an empty POST."""
        return self.change(doing, lambda: self._rest("POST", url, {}))

    def url(self, host: str, path: str) -> str:
        """Of a path at one of Google's hosts, or at `endpoints`."""
        return f"{self.endpoints.http if self.endpoints else f'https://{host}'}/{path}"

    def _rest(self, method: str, url: str, query: dict[str, str]) -> dict[str, Any]:
        answer = self.session.request(method, url, params=query, timeout=SECONDS)  # type: ignore[no-untyped-call]
        if not answer.ok:
            raise _Refused(answer)
        return answer.json()

    def _call(self, doing: str, call: Callable[[], T]) -> T:
        try:
            self._stay_signed_in()
            return call()
        except CloudError:
            raise
        except _Refused as refused:
            raise judge(of_json(refused.body, refused.status), doing, self.project) from None
        except Exception as error:
            if found := translate(error, doing, self.project):
                raise found from error
            raise

    def _stay_signed_in(self) -> None:
        """gRPC would report credentials that cannot be renewed as a server that cannot be reached, and try again."""
        with self._lock:
            if not self.credentials.valid:
                from google.auth.transport.requests import Request

                self.credentials.refresh(functools.partial(Request(), timeout=SECONDS))


class _Refused(Exception):
    def __init__(self, answer: Any):
        super().__init__(answer.status_code)
        self.status: int = answer.status_code
        try:
            self.body: dict[str, Any] = answer.json()
        except ValueError:
            self.body = {"error": {"message": answer.text[:300]}}


def _transient(error: BaseException) -> bool:
    import requests
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    if isinstance(error, _Refused):
        return error.status in TRANSIENT
    return isinstance(
        error,
        api.TooManyRequests | api.ServerError | auth.TransportError | requests.ConnectionError | requests.Timeout,
    )
