"""A folder on many machines: sent, ignored, secret and deleted files, and broken transfers."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from tpuswarm.errors import InputError
from tpuswarm.remote.connect import run_shell
from tpuswarm.remote.supervisor import Supervisor
from tpuswarm.remote.sync import tree_store
from tpuswarm.remote.sync.listing import list_files
from tpuswarm.remote.sync.send import send
from tpuswarm.remote.sync.tree_store import TreeStore


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def project(tmp_path):
    """A repository with a file that is tracked, one that is not, and one that is ignored."""
    root = write(tmp_path / "project", train_py="print(1)", new_txt="new", data__big_bin="0", _gitignore="data/\n")
    subprocess.run("git init -q . && git add train.py .gitignore", shell=True, cwd=root, check=True)
    return root


@pytest.fixture
def sync(machines, tmp_path):
    def run(root, hosts=None, **options):
        kept = TreeStore(tmp_path / "kept")
        tree = kept.take(root, lambda total, new: None)

        return machines.run(lambda connections: send(connections, hosts or machines.hosts, tree, kept, **options))

    return run


def files(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_files_that_git_does_not_ignore_are_listed(project):
    assert list_files(project) == [".gitignore", "new.txt", "train.py"]
    (project / "train.py").unlink()
    inner = write(project / "inner", own_py="x")
    subprocess.run("git init -q . && git add own.py", shell=True, cwd=inner, check=True)
    assert list_files(project) == [".gitignore", "inner/own.py", "new.txt"]


def test_files_are_listed_without_a_repository(tmp_path):
    root = write(tmp_path / "plain", a_py="", _venv__x_py="", out__log_txt="", _gitignore="out/\n")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "a.pyc").touch()
    assert list_files(root) == [".gitignore", "a.py"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env", "A=1"),
        (".env.local", "A=1"),
        ("keys/id_ed25519", "x"),
        ("server.pem", "-----BEGIN RSA PRIVATE KEY-----\n"),
        ("account.json", '{"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----"}'),
        ("adc.json", '{"client_id": "x", "refresh_token": "1//x"}'),
        ("aws/credentials", "[default]\naws_secret_access_key = x\n"),
        ("prod.env", "A=1"),
        (".envrc", "export A=1"),
        (".npmrc", "//registry/:_authToken=x"),
        (".git-credentials", "x"),
    ],
)
def test_secrets_are_refused_with_the_ways_out(project, tmp_path, name, text):
    def take():
        return TreeStore(tmp_path / "kept").take(project, lambda total, new: None).files

    write(project, _env_example="A=", cert_pem="-----BEGIN CERTIFICATE-----\n")
    assert ".env.example" in take()
    path = project / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(InputError, match=rf"^{name} would leave .* \[setup\] secrets.*\.gitignore"):
        take()
    (project / ".gitignore").write_text(f"data/\n{name}\n")
    assert name not in take()


def test_file_replaced_with_its_size_and_time_is_stored_again(project, tmp_path, monkeypatch):
    monkeypatch.setattr(tree_store, "UNSURE_S", 0)
    store, before = TreeStore(tmp_path / "kept"), (project / "train.py").stat()
    first = store.take(project, lambda total, new: None)
    (project / "train.py").write_text("print(2)")
    os.utime(project / "train.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.take(project, lambda total, new: None).digest != first.digest


def test_all_machines_get_the_folder_and_later_only_changes(project, sync, machines):
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    (project / "link").symlink_to("train.py")
    first = sync(project)
    assert len(first.changed) == 3 and not first.failed
    for machine in machines:
        there = machine.home / "project"
        assert files(there) == {name: (project / name).read_bytes() for name in list_files(project) if name != "link"}
        assert os.access(there / "run.sh", os.X_OK) and (there / "link").readlink() == Path("train.py")
    assert len(sync(project).same) == 3

    (project / "train.py").write_text("print(2)")
    changes = sync(project).changed
    assert {change.send for change in changes.values()} == {("train.py",)}
    assert (machines[2].home / "project/train.py").read_text() == "print(2)"


def test_shell_that_prints_as_it_starts_disturbs_nothing(project, sync, machines):
    for machine in machines:
        (machine.root / "etc/chatty-shell").touch()
    sync(project)
    assert all((machine.home / "project/train.py").read_text() == "print(1)" for machine in machines)
    (host, *_), calls = machines.hosts, []

    async def ask(connections) -> None:
        calls.append(await run_shell(connections, host, "cat; exit 3", b"given\n"))
        supervisor = Supervisor(connections, host)
        await supervisor.start("talks", 1, {"line": "echo said"})
        while (await supervisor.show())["talks"]["state"] == "running":
            await asyncio.sleep(0.02)
        calls.append((await supervisor.log("talks", 9))[1])

    machines.run(ask)
    assert calls == [(3, b"given\n", b""), b"said\n"]


def test_deleted_file_is_deleted_there_and_files_made_there_stay(project, sync, machines):
    write(project, sub__old_py="x")
    sync(project)
    made = machines[0].home / "project/runs/metrics.jsonl"
    made.parent.mkdir()
    made.write_text("{}")
    (project / "sub/old.py").unlink()
    asked = []
    outcome = sync(project, confirm=lambda changes: asked.append(dict(changes)) or True)
    assert {change.delete for change in asked[0].values()} == {("sub/old.py",)} and not outcome.failed
    assert made.exists() and not (machines[0].home / "project/sub").exists()


def test_file_made_there_is_left_or_named_also_without_the_list(project, sync, machines):
    sync(project)
    homes = [machine.home for machine in machines]
    (homes[0] / "project/results.txt").write_text("made there")
    (homes[1] / ".tpuswarm/trees/project.tree").unlink()
    (homes[1] / "project/train.py").write_text("print('edited')")
    (project / "results.txt").write_text("of here")
    edited = {"node-0/0": ("results.txt",), "node-1/0": ("train.py",)}
    left = sync(project, keep_edited=True)
    assert {host.label: paths for host, paths in left.kept.items()} == edited
    assert (homes[0] / "project/results.txt").read_text() == "made there"
    assert (homes[1] / "project/train.py").read_text() == "print('edited')"
    assert [(home / "project/results.txt").read_text() for home in homes[1:]] == ["of here"] * 2
    changes = sync(project).changed  # a person's sync lists and overwrites them
    assert {host.label: change.edited for host, change in changes.items()} == edited
    assert len(sync(project).same) == 3 and (homes[0] / "project/results.txt").read_text() == "of here"


def test_lost_connection_leaves_whole_files_and_the_next_sync_continues(project, sync, machines):
    for number in range(30):
        (project / f"{number:02}.bin").write_bytes(os.urandom(1 << 18))
    lost = machines[0]

    def cut(host, count):
        if host == lost.host and len(list((lost.home / "project").glob("*.bin"))) >= 3:
            machines.disconnect(0)

    outcome = sync(project, on_bytes=cut)
    assert [host.label for host in outcome.failed] == ["node-0/0"] and len(outcome.changed) == 2
    assert "the same command resumes" in str(outcome.failed[lost.host])
    arrived = {path.name for path in (lost.home / "project").glob("*.bin")}
    assert 0 < len(arrived) < 30
    assert all((lost.home / "project" / name).read_bytes() == (project / name).read_bytes() for name in arrived)
    (again,) = sync(project).changed.values()
    assert len(again.send) <= 33 - len(arrived)
    assert files(lost.home / "project") == {name: (project / name).read_bytes() for name in list_files(project)}
