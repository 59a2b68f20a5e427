"""What one asks of a running local cloud beside Google's APIs: its state, and bad weather."""

import json
import urllib.error
import urllib.request
from typing import Any

from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.rehearsal.connect import running
from tpuswarm.cloud.rehearsal.place import Place
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.storage.connection import LOCAL_TOKEN

SECONDS = 60
PROXY_FREE = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""What is on loopback is asked directly, whatever proxy is set."""


def ask(place: Place, verb: str, **body: Any) -> dict[str, Any]:
    """The answer to a verb of `control`. Raises InputError where no server runs, or it says that this cannot be."""
    endpoints = running(place)
    if endpoints is None:
        raise InputError(f"no local cloud runs in {place.folder}; `tpuswarm rehearsal start` starts it")
    request = urllib.request.Request(
        f"{endpoints.http}/rehearsal/{verb}",
        data=json.dumps(body).encode() if verb != "status" else None,
        headers={"Authorization": f"Bearer {endpoints.token}", "Content-Type": "application/json"},
    )
    try:
        with PROXY_FREE.open(request, timeout=SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sentence = json.load(error)["error"]["message"]
        raise (RunFailed if error.code == 500 else InputError)(sentence) from error
    except urllib.error.URLError as error:
        raise RunFailed(f"the local cloud does not answer ({error.reason}); {place.log} may say why") from error


def environment(place: Place, endpoints: Endpoints) -> dict[str, str]:
    """Variables with which gcloud and tpuswarm use the local cloud."""
    http = endpoints.http
    return {
        # gcloud keeps a configuration for it, away from the one with real credentials.
        "CLOUDSDK_CONFIG": str(place.folder / "gcloud"),
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(place.token_file),
        "CLOUDSDK_CORE_PROJECT": "rehearsal",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{http}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{http}/compute/v1/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{http}/storage/v1/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_SERVICEUSAGE": f"{http}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING": f"{http}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER": f"{http}/",
        "STORAGE_EMULATOR_HOST": http,
        LOCAL_TOKEN: endpoints.token,
    }
