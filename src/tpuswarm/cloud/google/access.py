"""Access to one project: credentials and clients, made when they are first needed, and how each call is made."""

import functools
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.google.answers import of_json, translate
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.google.failures import judge
from tpuswarm.cloud.google.settings import find_project

if TYPE_CHECKING:
    from google.cloud import tpu_v2
    from requests import PreparedRequest, Response, Session

SECONDS = 30.0
"""That an answer may take. Google's clients wait for ever unless they are told."""
PATIENCE = 10.0
"""Seconds for which a question is asked again while it is not answered."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 4.0
"""Seconds between two tries at most; each pause is random within that."""
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
        """The client of the TPU API. Importing it takes longer than most calls."""
        from google.cloud.tpu_v2 import TpuClient
        from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

        if self.endpoints:
            return TpuClient(transport=TpuGrpcTransport(channel=self.endpoints.channel()))
        return TpuClient(credentials=self.credentials)

    @functools.cached_property
    def session(self) -> "Session":
        """For REST: of APIs without a client of their own, and where importing that takes longer than the call."""
        from requests import Session

        def sign(request: "PreparedRequest") -> "PreparedRequest":
            self.credentials.apply(request.headers)
            return request

        # Not google-auth's AuthorizedSession: importing that brings all of cryptography, a sixth of what `list` takes.
        found = Session()
        found.auth = sign
        return found

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
        deadline, pause = time.monotonic() + PATIENCE, FIRST_PAUSE
        # Not google.api_core's retry: importing it brings gRPC, which most commands do without.
        while True:
            try:
                return self._call(doing, call)
            except CloudError as error:
                cause = error.__cause__ or error
                if not _transient(cause) or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause * random.random())
            pause = min(2 * pause, LONGEST_PAUSE)

    def change(self, doing: str, call: Callable[[], T]) -> T:
        """What comes of a call that changes something.

        It is made once: where the answer is lost, what was done shows in what is there, and asking blindly again may
        do it twice.
        """
        return self._call(doing, call)

    def get(self, doing: str, url: str, **query: str) -> dict[str, Any]:
        """The JSON that a REST API answers at `url`."""
        return self.ask(doing, lambda: self.rest("GET", url, query).json())

    def pages(self, doing: str, url: str, **query: str) -> list[dict[str, Any]]:
        """All pages of what a REST API lists at `url`."""
        found = [self.get(doing, url, **query)]
        while token := found[-1].get("nextPageToken"):
            found.append(self.get(doing, url, pageToken=token, **query))
        return found

    def post(self, doing: str, url: str, body: Any = None, **query: str) -> dict[str, Any]:
        """The JSON of a REST API's answer to a POST of that as JSON; None: of nothing."""
        return self.change(doing, lambda: self.rest("POST", url, query, json=body).json())

    def url(self, host: str, path: str) -> str:
        """Of a path at one of Google's hosts, or at `endpoints`."""
        return f"{self.endpoints.http if self.endpoints else f'https://{host}'}/{path}"

    def rest(self, method: str, url: str, query: dict[str, str], **body: Any) -> "Response":
        """One call of a REST API, for `ask` and `change`; `body` as requests takes it."""
        answer = self.session.request(method, url, params=query, timeout=SECONDS, **body)
        if answer.status_code == 401:  # by Google's clock the token has ended, by ours it has not
            with self._lock:
                self._renew()
            answer = self.session.request(method, url, params=query, timeout=SECONDS, **body)
        if not answer.ok:
            raise _Refused(answer)
        return answer

    def _call(self, doing: str, call: Callable[[], T]) -> T:
        try:
            self._stay_signed_in()
            return call()
        except CloudError:
            raise
        except _Refused as refused:
            raise judge(of_json(refused.body, refused.status), doing, self.project) from refused
        except Exception as error:
            if found := translate(error, doing, self.project):
                raise found from error
            raise

    def _stay_signed_in(self) -> None:
        """gRPC would report credentials that cannot be renewed as a server that cannot be reached, and try again."""
        with self._lock:
            if not self.credentials.valid:
                self._renew()

    def _renew(self) -> None:
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
    if isinstance(error, _Refused):
        return error.status in TRANSIENT
    import requests
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    return isinstance(
        error,
        api.TooManyRequests | api.ServerError | auth.TransportError | requests.ConnectionError | requests.Timeout,
    )
