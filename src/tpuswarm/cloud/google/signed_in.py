"""Credentials from where people sign in. Imports google-auth: to be imported by the call that needs it."""

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
from tpuswarm.cloud.google.settings import account, gcloud_folder

SECONDS = 60.0
"""For which gcloud is waited for."""


def credentials(project: str) -> Any:
    """Application default credentials, else those of gcloud itself. Calls are billed to `project`.

    Raises google.auth.exceptions.GoogleAuthError.
    """
    mine = gcloud_folder() / "application_default_credentials.json"
    if not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        if not mine.exists() and account() and shutil.which("gcloud"):
            return Gcloud()  # type: ignore[no-untyped-call]
        if mine.exists() and json.loads(mine.read_text(encoding="utf-8")).get("type") == "authorized_user":
            # As google.auth.default() would, which also runs gcloud for a project, a second or two.
            found = Credentials.from_authorized_user_file(str(mine), [SCOPE])  # type: ignore[no-untyped-call]
            return found if found.quota_project_id else found.with_quota_project(project)
    return google.auth.default(scopes=[SCOPE])[0]


class Gcloud(Base):
    """Of whoever is signed in to gcloud, for those who never asked it for application default credentials."""

    def refresh(self, request: Any) -> None:
        """Have gcloud renew its token, or hand out the one it has. Raises RefreshError."""
        asked = ["gcloud", "config", "config-helper", "--format=json(credential)"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise RefreshError(f"gcloud gave no token within {SECONDS:.0f} s") from None  # type: ignore[no-untyped-call]
        if done.returncode != 0:
            raise RefreshError(done.stderr.strip() or "gcloud gives no token")  # type: ignore[no-untyped-call]
        credential = json.loads(done.stdout)["credential"]
        self.token = credential["access_token"]
        expiry = datetime.datetime.fromisoformat(credential["token_expiry"])
        self.expiry = expiry.astimezone(datetime.UTC).replace(tzinfo=None)  # google-auth counts in naive UTC
