"""This computer's SSH key: made whole, and checked before anything is created."""

import subprocess
from pathlib import Path

import pytest

from tests.remote.test_connect import names
from tpuswarm.errors import InputError
from tpuswarm.remote.own_key import find_key, key_file, make_key

DAMAGED = "ssh/tpuswarm is not a whole private key: delete it and run the same command again, which makes a new one"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


@pytest.fixture
def agent(home, monkeypatch):
    socket = home / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.PIPE)
    process.stdout.readline()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    yield
    process.kill()
    process.communicate()


def test_key_that_was_cut_off_is_reported_and_replaced_as_the_error_says(home):
    public, content = make_key(), key_file().read_bytes()
    for length in range(len(content) - 1):
        key_file().write_bytes(content[:length])
        with pytest.raises(InputError, match=DAMAGED):
            make_key()
    key_file().unlink()
    assert make_key() != public and make_key() == find_key()
    key_file().with_suffix(".pub").write_text(public)  # of another key, which machines would be given
    assert find_key() is None and make_key() != public and make_key() == find_key()


def test_commands_report_a_damaged_key(fleet, tmp_path, monkeypatch):
    monkeypatch.setitem(fleet.environment, "HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/tpuswarm").touch()
    work = tmp_path / "work"
    work.mkdir()
    lines = "exec all -- true", f"copy {work} all:", "doctor all", "ssh slice", "sync --fleet trio", "up --yes"
    for line in lines:
        err = fleet.run(*line.split(), code=2, cwd=work if "sync" in line else None)[1]
        assert DAMAGED in " ".join(err.split()), line


def test_key_with_a_passphrase_works_with_an_agent(machines, home, agent):
    path = key_file()
    path.parent.mkdir()
    machines.key.rename(path)
    subprocess.run(["ssh-add", "-q", path], check=True)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", path], stdout=subprocess.DEVNULL, check=True)
    assert make_key() == find_key()
    assert [name[:2] for name in names(None, machines.hosts, path)] == ["m0", "m1", "m2"]
    subprocess.run(["ssh-add", "-q", "-D"], check=True)
    with pytest.raises(InputError, match=rf"has a passphrase, and no SSH agent has the key: `ssh-add {path}`, or"):
        make_key()
