"""Name the Google credentials that this process uses, and how to replace them."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

KEY_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
SIGN_IN = "`gcloud auth application-default login`"


class UsedCredentials(NamedTuple):
    """The credentials in use, as errors describe them; without arguments, none."""

    remedy: str = f"sign in with {SIGN_IN}"
    place: str = ""
    """A file, or the program that holds them."""
    account: str = ""
    """Email address; empty if their file does not name it."""

    @property
    def note(self) -> str:
        """The account and the place, to append to an error."""
        account = f" of {self.account}" if self.account else ""
        return f"; the credentials{account} are from {self.place}" if self.place else ""


def used_credentials(gcloud_account: str | None = None) -> UsedCredentials:
    """Describe application default credentials, else those of the account that is signed in to gcloud."""
    variable, default = os.environ.get(KEY_VARIABLE), default_file()
    account = read_credentials(Path(variable) if variable else default).get("client_email", "")
    if variable:
        remedy = f"replace that file, or `unset {KEY_VARIABLE}` and sign in with {SIGN_IN}"
        return UsedCredentials(remedy, f"{variable}, which {KEY_VARIABLE} names", account)
    if default.exists():
        return UsedCredentials(place=str(default), account=account)
    if gcloud_account:
        return UsedCredentials("sign in with `gcloud auth login`", "gcloud", gcloud_account)
    return UsedCredentials()


def gcloud_folder() -> Path:
    """Return the folder of gcloud's configuration and credentials."""
    return Path(os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud")


def default_file() -> Path:
    """Return where `gcloud auth application-default login` writes credentials."""
    return gcloud_folder() / "application_default_credentials.json"


def read_credentials(path: Path) -> dict[str, Any]:
    """Return the content of a file of credentials; empty if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
