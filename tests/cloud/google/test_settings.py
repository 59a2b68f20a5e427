"""Sources of project and zone, and their precedence."""

import pytest

from tpuswarm.cloud.google.settings import find_project, find_zone, gcloud_account
from tpuswarm.errors import InputError


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """Write a configuration of gcloud: gcloud(name, text)."""
    variables = ("CORE_PROJECT", "COMPUTE_ZONE", "ACTIVE_CONFIG_NAME")
    for name in ("GOOGLE_CLOUD_PROJECT", *(f"CLOUDSDK_{variable}" for variable in variables)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    (tmp_path / "configurations").mkdir()

    def write(name: str, text: str) -> None:
        (tmp_path / "configurations" / f"config_{name}").write_text(text)

    return write


def test_missing_project_error_says_how_to_set_one(gcloud):
    assert find_zone() is None and gcloud_account() is None
    with pytest.raises(InputError, match="gcloud config set project"):
        find_project()


def test_environment_and_options_override_gcloud(gcloud, tmp_path, monkeypatch):
    gcloud("default", "[core]\nproject = from-gcloud\naccount = me@example.com\n[compute]\nzone = us-central1-f\n")
    assert (find_project(), find_zone(), gcloud_account()) == ("from-gcloud", "us-central1-f", "me@example.com")
    gcloud("work", "[core]\nproject = from-work\n")
    (tmp_path / "active_config").write_text("work")
    assert (find_project(), find_zone()) == ("from-work", None)
    monkeypatch.setenv("CLOUDSDK_ACTIVE_CONFIG_NAME", "default")
    assert find_project() == "from-gcloud"
    monkeypatch.setenv("CLOUDSDK_CORE_PROJECT", "from-sdk")
    assert find_project() == "from-sdk"
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "from-environment")
    assert find_project() == "from-environment"
    assert find_project("typed") == "typed"
    monkeypatch.setenv("CLOUDSDK_COMPUTE_ZONE", "europe-west4-a")
    assert (find_zone(), find_zone("asia-east1-c")) == ("europe-west4-a", "asia-east1-c")


def test_damaged_gcloud_configuration_is_reported(gcloud):
    gcloud("default", "project = nowhere\n")
    with pytest.raises(InputError, match="gcloud's configuration default cannot be read"):
        find_project()
