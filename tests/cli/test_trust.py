"""A stranger's run executes no code of its own without consent."""

import shutil
from pathlib import Path

import pytest
import tomli_w

from tpuswarm.train.run.directory import read_config

OWN = Path(__file__).with_name("my_recipe.py")


@pytest.fixture(autouse=True)
def new_computer(tmp_path, monkeypatch):
    """A computer on which nobody has trusted anything."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_run(typed, tmp_path):
    """A run that this user trained with a function in a file, as (run, file)."""
    file = shutil.copy(OWN, tmp_path)
    code, _, err = typed("train", f"{file}:line", "--steps", "2", "--batch", "8", "--run", "own")
    assert code == 0, err
    return Path("own"), Path(file)


def change_target(run: Path, target: str, /, **options: str) -> None:
    config = read_config(run)
    config["recipe"] |= {"target": target, "options": options}
    (run / "config.toml").write_text(tomli_w.dumps(config))


STRANGE = {
    "os:system": {"command": "touch executed"},
    "subprocess:getoutput": {"cmd": "touch executed"},
    "own/evil.py:run": {},
    "tpuswarm.recipes.evil.py:run": {},
    "tpuswarm.recipes.stylegan2.distances:user_features": {"target": "own/evil.py:run"},
    "tpuswarm.train.user_code:_import_file": {"path": "own/evil.py"},
}
EVIL = "from pathlib import Path\nPath('executed').touch()\ndef run(): ...\n"


@pytest.mark.parametrize("target", STRANGE)
def test_code_of_a_strangers_run_is_not_executed(own_run, typed, target):
    for file in ("own/evil.py", "tpuswarm.recipes.evil.py"):
        Path(file).write_text(EVIL)
    change_target(own_run[0], target, **STRANGE[target])
    for words in ("sample own", "evaluate own", "export own out", f"project own {OWN}", "train --run own"):
        code, _, err = typed(*words.split())
        assert code == 2 and f"own executes code that is not part of tpuswarm: {target}" in err
        assert "add --trust" in err and not Path("executed").exists()


@pytest.mark.parametrize(
    "target", ["os:system", "subprocess:getoutput", "tpuswarm.recipes.stylegan2.distances:user_features"]
)
def test_only_what_is_marked_as_a_recipe_is_called(own_run, typed, target):
    change_target(own_run[0], target, **STRANGE.get(target, {}))
    code, _, err = typed("sample", "own", "--trust")
    assert code == 2 and "is not called" in err and not Path("executed").exists()


def test_consent_lasts_until_the_file_changes(own_run, typed, monkeypatch):
    run, file = own_run
    assert typed("evaluate", "own")[0] == 0, "the user named this file when training"
    file.write_text(file.read_text() + "\n# changed\n")
    assert "add --trust" in typed("evaluate", "own")[2]
    code, _, err = typed("train", f"{OWN}:line", "--steps", "1", "--batch", "8", "--init-from", "own")
    assert code == 2 and "add --trust" in err
    assert typed("evaluate", "own", "--trust")[0] == 0 and typed("evaluate", "own")[0] == 0
    change_target(run, f"{file}:needs_width", width="3")
    assert "add --trust" in typed("evaluate", "own")[2], "another function of the file"


def test_a_terminal_asks(own_run, typed, monkeypatch):
    own_run[1].write_text(own_run[1].read_text() + "\n# changed\n")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda *_, **options: "n")
    assert typed("evaluate", "own")[0] == 1
    monkeypatch.setattr("typer.prompt", lambda *_, **options: "y")
    code, _, err = typed("evaluate", "own")
    assert code == 0 and f"own executes {own_run[1]}:line, which is not part of tpuswarm." in err
