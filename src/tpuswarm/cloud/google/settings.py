"""Find project and zone: from options, the environment, or gcloud's configuration."""

import configparser
import os
from pathlib import Path

from tpuswarm.errors import InputError
from tpuswarm.train.storage.credentials import gcloud_folder, used_credentials

VARIABLES = {
    "core/project": ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"),
    "compute/zone": ("CLOUDSDK_COMPUTE_ZONE",),
}
"""Environment variables of Google's tools, by gcloud's property; the first one that is set counts."""


def find_project(given: str | None = None) -> str:
    """Return the project: given, else from the environment or gcloud. Raises InputError if there is none."""
    if project := given or _read_setting("core/project"):
        return project
    raise InputError(
        "no project is set; set it with `gcloud config set project MY-PROJECT` for all commands, the variable "
        'GOOGLE_CLOUD_PROJECT for a shell, or project = "MY-PROJECT" in swarm.toml for a fleet'
    )


def find_zone(given: str | None = None) -> str | None:
    """Return the zone: given, else from the environment or gcloud; None if there is none."""
    return given or _read_setting("compute/zone")


def gcloud_account() -> str | None:
    """Return the account that is signed in to gcloud."""
    return _read_gcloud_property("core/account")


def signed_in_account() -> str | None:
    """Return the email address of the credentials in use, if their file or gcloud names it."""
    return used_credentials().account or gcloud_account()


def project_note(project: str) -> str:
    """Return where a project comes from, as text that continues an error; empty if the user named it."""
    variables = [f"the variable {name}" for name in VARIABLES["core/project"] if os.environ.get(name) == project]
    gcloud = ["gcloud's configuration"] if _read_gcloud_property("core/project") == project else []
    return f"; project {project} is from {place}" if (place := next(iter(variables + gcloud), None)) else ""


def _read_setting(name: str) -> str | None:
    named = (os.environ.get(variable) for variable in VARIABLES[name])
    return next((value for value in named if value), None) or _read_gcloud_property(name)


def _read_gcloud_property(name: str) -> str | None:
    """Read a property of gcloud's active configuration from its files, a thousand times faster than gcloud."""
    section, key = name.split("/")
    folder = gcloud_folder()
    active = os.environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or _read_text(folder / "active_config").strip() or "default"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(_read_text(folder / "configurations" / f"config_{active}"))
    except configparser.Error as error:
        raise InputError(f"gcloud's configuration {active} cannot be read: {error}") from None
    return parser.get(section, key, fallback=None) or None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
