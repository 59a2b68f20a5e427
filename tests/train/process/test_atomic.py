"""A folder is there whole, under the name that was asked for, or not at all."""

from pathlib import Path

import pytest

from tpuswarm.errors import InputError
from tpuswarm.train.process.atomic import whole_folder


def test_it_has_its_name_when_all_is_in_it(tmp_path):
    with whole_folder(tmp_path / "new" / "out") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "new" / "out").exists()
    assert (tmp_path / "new" / "out" / "file").read_text() == "whole"
    with pytest.raises(InputError, match="out already exists"), whole_folder(tmp_path / "new" / "out"):
        pass


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), whole_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("half")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_link_to_an_empty_folder_stays_a_link(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with whole_folder(tmp_path / "link") as folder:
        (folder / "file").write_text("whole")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "file").exists()


def test_the_folder_one_is_in_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".", str(tmp_path)):
        with pytest.raises(InputError, match="is the current folder; use a new one inside it"):
            whole_folder(Path(name)).__enter__()
