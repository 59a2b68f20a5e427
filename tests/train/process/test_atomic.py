"""A file or folder is there whole or not at all."""

import os
from pathlib import Path

import pytest

from tpuswarm.errors import InputError
from tpuswarm.train.process.atomic import whole_folder, write_atomically


def test_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "one")

    def fail(_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="power cut"):
        write_atomically(path, "two")
    assert path.read_text() == "one"


def test_folder_gets_its_name_once_all_is_in_it(tmp_path):
    with whole_folder(tmp_path / "new" / "out") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "new" / "out").exists()
    assert (tmp_path / "new" / "out" / "file").read_text() == "whole"
    with pytest.raises(InputError, match="out already exists"), whole_folder(tmp_path / "new" / "out"):
        pass


def test_failure_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), whole_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("half")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_link_to_an_empty_folder_stays_a_link(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with whole_folder(tmp_path / "link") as folder:
        (folder / "file").write_text("whole")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "file").exists()


def test_current_folder_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".", str(tmp_path)):
        with pytest.raises(InputError, match="is the current folder; use a new one inside it"):
            whole_folder(Path(name)).__enter__()
