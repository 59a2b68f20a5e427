"""`sync` and `copy` as commands, on machines of a local cloud."""

import subprocess

import pytest

from tests.terminal import terminal


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    subprocess.run(["git", "init", "-q", root], check=True)
    (root / "train.py").write_text("print(1)")
    return root


def test_sync_says_what_it_does_and_all_workers_have_it(fleet, project):
    out, _ = fleet.run("sync", "all", "--fleet", "trio", "--dry-run", cwd=project)
    assert "5 hosts: 1 file, 8 B: train.py" in out and "nothing was sent" in out
    out, _ = fleet.run("sync", "--fleet", "trio", cwd=project)
    assert "5 of 5 hosts have ~/project as it is here (1 file, 8 B); 0 had it already" in out
    assert (fleet.user_home("v5e-usc1a-0-3") / "project/train.py").read_text() == "print(1)"
    (project / "train.py").rename(project / "main.py")
    out, _ = fleet.run("sync", "slice", "--fleet", "trio", cwd=project)
    assert "4 hosts: 1 file, 8 B: main.py" in out and "4 hosts: deletes train.py" in out
    with terminal(["sync", "--fleet", "trio"], project, env=fleet.environment) as screen:
        assert "5 of 5 hosts have ~/project as it is here (1 file, 8 B); 4 had it already" in screen.finish()


def test_sync_refuses_secrets_homes_and_asks_above_100_mb(fleet, project):
    (project / ".env").write_text("TOKEN=x")
    _, err = fleet.run("sync", "--fleet", "trio", cwd=project, code=2)
    assert ".env would leave this computer" in err
    (project / ".env").unlink()
    with (project / "weights.bin").open("wb") as file:
        file.truncate(150_000_000)
    out, err = fleet.run("sync", "--fleet", "trio", cwd=project, code=2)
    assert "150.0 MB that git does not ignore" in out and "give --yes" in err
    _, err = fleet.run("sync", code=2)
    assert "cd into yours" in err


def test_copy_goes_to_all_workers_and_comes_back_from_each(fleet, tmp_path):
    (tmp_path / "data.txt").write_text("data")
    out, _ = fleet.run("copy", str(tmp_path / "data.txt"), "slice:in/", "--fleet", "trio")
    assert "1 file copied to 4 of 4 hosts" in out
    fleet.run("copy", "slice:in", str(tmp_path / "back"))
    assert sorted(str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*.txt")) == [
        f"v5e-usc1a-0-{worker}/in/data.txt" for worker in range(4)
    ]
    fleet.run("copy", "v5e-usc1a-0/2:in/data.txt", str(tmp_path / "one.txt"))
    assert (tmp_path / "one.txt").read_text() == "data"
    for words, said in [
        (("a", "b"), "one of SRC and DST is WHERE:path"),
        (("nothing", "slice:"), "there is no file or folder nothing"),
        (("slyce:x", "y"), "did you mean slice?"),
    ]:
        assert said in fleet.run("copy", *words, code=2)[1]
