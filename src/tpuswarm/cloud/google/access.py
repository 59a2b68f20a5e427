"""Call Google's APIs for one project: credentials, clients, retries and errors."""

import functools
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tpuswarm.cloud.errors import CloudError, Unreachable
from tpuswarm.cloud.google.answers import answer_from_json, to_cloud_error
from tpuswarm.cloud.google.endpoints import LOCAL_ACCOUNT, Endpoints, token_credentials
from tpuswarm.cloud.google.failures import cloud_error_for
from tpuswarm.cloud.google.nodes import SCOPE
from tpuswarm.cloud.google.settings import find_project, gcloud_account, project_note, signed_in_account
from tpuswarm.train.storage.credentials import UsedCredentials, used_credentials

if TYPE_CHECKING:
    from google.cloud import tpu_v2
    from requests import PreparedRequest, Response, Session

REQUEST_TIMEOUT_S = 30.0
"""Google's clients have no timeout by default."""
RETRY_WINDOW_S = 10.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 4.0
"""Bounds of the backoff; a pause is random up to the backoff."""
OPERATION_TIMEOUT_S, POLL_INTERVAL_S = 600.0, 1.0
"""For enabling an API, making a network, or roles that begin to count."""
TRANSIENT_STATUSES = (429, 500, 502, 503, 504)
"""REST answers that are retried."""

T = TypeVar("T")


class Access:
    """A project at Google, or at `endpoints`. Reads and contacts nothing before the first call."""

    def __init__(self, project: str | None = None, endpoints: Endpoints | None = None):
        self._given = project
        self.endpoints = endpoints
        self._lock = threading.Lock()

    @functools.cached_property
    def project(self) -> str:
        """The project's id. Raises InputError if none is configured."""
        return find_project(self._given)

    @functools.cached_property
    def credentials(self) -> Any:
        """Application default credentials, else gcloud's. Raises NotSignedIn."""
        if self.endpoints:
            return self.endpoints.credentials()
        from tpuswarm.cloud.google.signed_in import find_credentials

        try:
            return find_credentials(self.project)
        except Exception as error:
            raise to_cloud_error(error, "signing in", self.project, *self._origin()) or error from error

    @functools.cached_property
    def tpu(self) -> "tpu_v2.TpuClient":
        """The client of the TPU API. Its import takes longer than most calls."""
        from google.cloud.tpu_v2 import TpuClient
        from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

        if self.endpoints:
            return TpuClient(transport=TpuGrpcTransport(channel=self.endpoints.channel()))
        return TpuClient(credentials=self.credentials)

    @functools.cached_property
    def session(self) -> "Session":
        """For REST calls: to APIs without a client, and where the client's import would take longer than the call."""
        from requests import Session

        def sign(request: "PreparedRequest") -> "PreparedRequest":
            self.credentials.apply(request.headers)
            return request

        # Not google-auth's AuthorizedSession: it imports cryptography, which takes a sixth of `list`.
        session = Session()
        session.auth = sign
        return session

    @property
    def account(self) -> str | None:
        """The email address of the credentials; None if neither their file nor gcloud names it."""
        return LOCAL_ACCOUNT if self.endpoints else signed_in_account()

    def impersonate(self, account: str) -> "Access":
        """Return access as a service account, for some minutes.

        https://cloud.google.com/iam/docs/reference/credentials/rest/v1/projects.serviceAccounts/generateAccessToken
        """
        doing = f"acting as {account}"
        url = self.url("iamcredentials.googleapis.com", f"v1/projects/-/serviceAccounts/{account}:generateAccessToken")
        body = {"scope": [SCOPE], "lifetime": "600s"}
        answer = self.call_with_retries(doing, lambda: self.rest("POST", url, {}, json=body).json())
        access = Access(self.project, self.endpoints)
        access.credentials = token_credentials(answer["accessToken"])
        return access

    def call_with_retries(self, doing: str, call: Callable[[], T]) -> T:
        """Call a read, and retry transient failures for RETRY_WINDOW_S; `doing` names it in errors."""
        deadline, pause = time.monotonic() + RETRY_WINDOW_S, MIN_PAUSE_S
        # Not google.api_core's retry: it imports gRPC, which most commands do not need.
        while True:
            try:
                return self.call_once(doing, call)
            except CloudError as error:
                cause = error.__cause__ or error
                if not _is_transient(cause) or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause * random.random())
            pause = min(2 * pause, MAX_PAUSE_S)

    def call_once(self, doing: str, call: Callable[[], T]) -> T:
        """Call once; for changes, because a retry after a lost answer could apply one twice."""
        try:
            self._stay_signed_in()
            return call()
        except CloudError:
            raise
        except _Refused as refused:
            answer = answer_from_json(refused.body, refused.status)
            raise cloud_error_for(answer, doing, self.project, *self._origin()) from refused
        except Exception as error:
            if cloud_error := to_cloud_error(error, doing, self.project, *self._origin()):
                raise cloud_error from error
            raise

    def _origin(self) -> tuple[UsedCredentials, str]:
        """Return where credentials and project come from, for errors; at `endpoints` nothing."""
        if self.endpoints:
            return UsedCredentials(), ""
        return used_credentials(gcloud_account()), project_note(self.project)

    def get(self, doing: str, url: str, **query: str) -> dict[str, Any]:
        """GET JSON from a REST API, with retries."""
        return self.call_with_retries(doing, lambda: self.rest("GET", url, query).json())

    def get_pages(self, doing: str, url: str, **query: str) -> list[dict[str, Any]]:
        """GET all pages of a list."""
        pages = [self.get(doing, url, **query)]
        while token := pages[-1].get("nextPageToken"):
            pages.append(self.get(doing, url, pageToken=token, **query))
        return pages

    def post(self, doing: str, url: str, body: Any = None, **query: str) -> dict[str, Any]:
        """POST JSON, once; return the JSON answer."""
        return self.call_once(doing, lambda: self.rest("POST", url, query, json=body).json())

    def url(self, host: str, path: str) -> str:
        """Return the URL of a path at one of Google's hosts, or at `endpoints`."""
        return f"{self.endpoints.http if self.endpoints else f'https://{host}'}/{path}"

    def rest(self, method: str, url: str, query: dict[str, str], **body: Any) -> "Response":
        """Make one REST call, inside `call_with_retries` or `call_once`; `body` are arguments of requests."""
        answer = self.session.request(method, url, params=query, timeout=REQUEST_TIMEOUT_S, **body)
        if answer.status_code == 401:  # expired by Google's clock, not by ours
            with self._lock:
                self._renew()
            answer = self.session.request(method, url, params=query, timeout=REQUEST_TIMEOUT_S, **body)
        if not answer.ok:
            raise _Refused(answer)
        return answer

    def _stay_signed_in(self) -> None:
        """Renew expired credentials first: gRPC would report the failure as an unreachable server, and retry."""
        with self._lock:
            if not self.credentials.valid:
                self._renew()

    def _renew(self) -> None:
        from google.auth.transport.requests import Request

        self.credentials.refresh(functools.partial(Request(), timeout=REQUEST_TIMEOUT_S))


class _Refused(Exception):
    def __init__(self, answer: Any):
        super().__init__(answer.status_code)
        self.status: int = answer.status_code
        try:
            self.body: dict[str, Any] = answer.json()
        except ValueError:
            self.body = {"error": {"message": answer.text[:300]}}


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, _Refused):
        return error.status in TRANSIENT_STATUSES
    import requests
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    return isinstance(
        error,
        api.TooManyRequests | api.ServerError | auth.TransportError | requests.ConnectionError | requests.Timeout,
    )


def wait_until(doing: str, is_done: Callable[[], bool]) -> None:
    """Poll an operation of Google until it is done. Raises Unreachable after OPERATION_TIMEOUT_S."""
    deadline = time.monotonic() + OPERATION_TIMEOUT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise Unreachable(f"{doing}: not done after {OPERATION_TIMEOUT_S / 60:.0f} minutes; run the command again")
        time.sleep(POLL_INTERVAL_S)
