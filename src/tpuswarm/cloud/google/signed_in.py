"""Find the user's Google credentials. Imports google-auth, so import this module inside functions."""

import datetime
import json
import os
import shutil
import subprocess
from typing import Any

import google.auth
from google.auth.credentials import Credentials as Base
from google.auth.exceptions import RefreshError
from google.oauth2.credentials import Credentials

from tpuswarm.cloud.google.nodes import SCOPE
from tpuswarm.cloud.google.settings import gcloud_account
from tpuswarm.train.storage.credentials import KEY_VARIABLE, default_file, read_credentials

GCLOUD_TIMEOUT_S = 60.0


def find_credentials(project: str) -> Any:
    """Return application default credentials, else gcloud's. Calls are billed to `project`.

    Raises google.auth.exceptions.GoogleAuthError.
    """
    path = default_file()
    if not os.environ.get(KEY_VARIABLE):
        if not path.exists() and gcloud_account() and shutil.which("gcloud"):
            return GcloudCredentials()  # type: ignore[no-untyped-call]
        if path.exists() and read_credentials(path).get("type") == "authorized_user":
            # Like google.auth.default(), without its second or two for running gcloud.
            user = Credentials.from_authorized_user_file(str(path), [SCOPE])  # type: ignore[no-untyped-call]
            return user if user.quota_project_id else user.with_quota_project(project)
    return google.auth.default(scopes=[SCOPE])[0]


class GcloudCredentials(Base):
    """Credentials of the account that is signed in to gcloud, for users without application default credentials."""

    def refresh(self, request: Any) -> None:
        """Get a token from gcloud. Raises RefreshError."""
        command = ["gcloud", "config", "config-helper", "--format=json(credential)"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GCLOUD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RefreshError(f"gcloud gave no token within {GCLOUD_TIMEOUT_S:.0f} s") from None  # type: ignore[no-untyped-call]
        if done.returncode != 0:
            raise RefreshError(done.stderr.strip() or "gcloud gives no token")  # type: ignore[no-untyped-call]
        credential = json.loads(done.stdout)["credential"]
        self.token = credential["access_token"]
        expiry = datetime.datetime.fromisoformat(credential["token_expiry"])
        self.expiry = expiry.astimezone(datetime.UTC).replace(tzinfo=None)  # google-auth counts in naive UTC
