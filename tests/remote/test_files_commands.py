"""`sync` and `copy` as commands, on machines of a local cloud."""

import subprocess

import pytest

from tests.terminal import CTRL_C, terminal

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    subprocess.run(["git", "init", "-q", root], check=True)
    (root / "train.py").write_text("print(1)")
    return root


def test_sync_shows_its_changes_and_makes_them_on_all_workers(fleet, project):
    out, _ = fleet.run("sync", "all", "--fleet", "trio", "--dry-run", cwd=project)
    assert "5 hosts: 1 file, 8 B: train.py" in out and "nothing was sent" in out
    out, _ = fleet.run("sync", "--fleet", "trio", cwd=project)
    assert "all 5 hosts have ~/project as it is here (1 file, 8 B)\n" in out
    assert (fleet.user_home("v5e-usc1a-0-3") / "project/train.py").read_text() == "print(1)"
    out, _ = fleet.run("exec", "v2", "--fleet", "trio", "--", "ls", cwd=project)
    assert out.endswith("│ train.py\n"), "commands start in the folder"
    (project / "train.py").rename(project / "main.py")
    out, _ = fleet.run("sync", "slice", "--fleet", "trio", cwd=project)
    assert "4 hosts: 1 file, 8 B: main.py" in out and "4 hosts: deletes train.py" in out
    with terminal(["sync", "--fleet", "trio"], project, env=fleet.environment) as screen:
        assert "all 5 hosts have ~/project as it is here (1 file, 8 B); 4 had it already" in screen.finish()


def test_sync_refuses_secrets_and_homes_and_asks_above_100_mb(fleet, project):
    (project / ".env").write_text("TOKEN=x")
    _, err = fleet.run("sync", "--fleet", "trio", cwd=project, code=2)
    assert ".env would leave this computer" in err
    (project / ".env").unlink()
    with (project / "weights.bin").open("wb") as file:
        file.truncate(150_000_000)
    out, err = fleet.run("sync", "--fleet", "trio", cwd=project, code=2)
    assert "150.0 MB that git does not ignore" in out and "add --yes" in err
    for no, code in ((b"n\r", 1), (b"\x04", 1), (CTRL_C, 130)):
        with terminal(["sync", "--fleet", "trio"], project, env=fleet.environment) as screen:
            screen.asked("[y/N]: ")
            screen.send(no)
            assert "\nnothing was done" in screen.finish(code)
    assert not (fleet.user_home("v5e-usc1a-0-0") / "project/weights.bin").exists()
    _, err = fleet.run("sync", code=2)
    assert "cd into yours" in err


def test_copy_goes_to_all_workers_and_comes_back_from_each(fleet, tmp_path):
    (tmp_path / "data.txt").write_text("data")
    out, _ = fleet.run("copy", str(tmp_path / "data.txt"), "slice:in/", "--fleet", "trio")
    assert "1 file copied to in/ of all 4 hosts" in out
    out, _ = fleet.run("copy", "slice:in", str(tmp_path / "back"))
    assert f"1 file copied from all 4 hosts to {tmp_path}/back, a folder for each host" in out
    assert sorted(str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*.txt")) == [
        f"v5e-usc1a-0-{worker}/in/data.txt" for worker in range(4)
    ]
    out, err = fleet.run("copy", "slice:nothing", str(tmp_path / "none"), code=1)
    assert "v5e-usc1a-0/3 has no file or folder nothing\n" in out and err.endswith("error: nothing was copied\n")
    assert not (tmp_path / "none").exists()
    fleet.run("copy", "v5e-usc1a-0/2:in/data.txt", str(tmp_path / "one.txt"))
    assert (tmp_path / "one.txt").read_text() == "data"
    fleet.run("copy", str(tmp_path / "data.txt"), "one:")
    fleet.run("copy", "one:data.txt", str(tmp_path / "of-a-pool"))
    out, _ = fleet.run("copy", "v2-usc1f-0:data.txt", str(tmp_path / "of-a-machine"))
    assert (tmp_path / "of-a-pool/v2-usc1f-0-0/data.txt").exists() and (tmp_path / "of-a-machine").is_file()
    assert out == f"1 file copied from v2-usc1f-0/0 to {tmp_path}/of-a-machine\n"
    for words, sentence in [
        (("a", "b"), "one of SRC and DST is on machines, as WHERE:path"),
        (("nothing", "slice:"), "there is no file or folder nothing"),
        (("slyce:x", "y"), "did you mean slice?"),
    ]:
        assert sentence in fleet.run("copy", *words, code=2)[1]
