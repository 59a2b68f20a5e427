import pytest


@pytest.fixture
def call(monkeypatch, typed, tmp_path):
    """Run a command line in this process, in an empty folder; (code, out, err)."""
    monkeypatch.chdir(tmp_path)
    return lambda line: typed(*line.split())
