"""Files and folders are written atomically."""

import os
from pathlib import Path

import pytest

from tpuswarm.errors import InputError
from tpuswarm.train.process.atomic import new_folder, write_atomically


def test_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "one")

    def fail(_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="power cut"):
        write_atomically(path, "two")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_folder_gets_its_name_once_all_is_in_it(tmp_path):
    with new_folder(tmp_path / "new" / "out") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "new" / "out").exists()
    assert (tmp_path / "new" / "out" / "file").read_text() == "whole"
    with pytest.raises(KeyError), new_folder(tmp_path / "failed") as folder:
        (folder / "file").write_text("half")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_folder_in_use_is_not_replaced_and_a_link_stays_one(tmp_path, monkeypatch):
    (tmp_path / "full" / "in").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with new_folder(tmp_path / "link") as folder:
        (folder / "file").write_text("whole")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "file").exists()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    current = "is the current folder; use a new one inside it"
    for name, words in ((".", current), (str(here), current), ("../full", "full already exists")):
        with pytest.raises(InputError, match=words):
            new_folder(Path(name)).__enter__()
