"""Rows of Parquet files, written by pyarrow, are read as the same rows of JSON lines, a few at a time."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from tests.recipes.chats import CHATS, messages, write_model

from tpuswarm.errors import InputError
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.language import parquet as reader
from tpuswarm.recipes.language.text import open_text

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CALL = [
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "time", "arguments": "UTC"}]},
]
ROWS = {
    "text": [{"text": f"Größe {n}\n"} for n in range(7)],
    "messages": [{"messages": [*messages(chat)]} for chat in CHATS] + [{"messages": CALL}],
    "completions": [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(7)],
    "lists": [{"prompt": messages(chat[:-1]), "completion": messages(chat[-1:])} for chat in CHATS],
    "mixed": [{"messages": messages(CHATS[0])}, {"prompt": "a", "completion": "b"}] * 4,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))


def write(path, rows, **options):
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    parquet.write_table(table.append_column("image", pyarrow.array([b"\xff"] * len(rows))), path, **options)
    return str(path)


@pytest.mark.parametrize("kind", ROWS)
def test_rows_train_as_the_same_json_lines(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(reader, "BATCH_ROWS", 2)
    place = write_model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "a.parquet", ROWS[kind][:2], row_group_size=1)
    write(tmp_path / "folder" / "b.parquet", ROWS[kind][2:], row_group_size=3)
    options = Decoder.options_at(place) | {"context": 32}
    lines, tables = (Decoder(**options | {"data": str(tmp_path / name)}).data("all") for name in ("a.jsonl", "folder"))
    assert lines.digest == tables.digest
    for name, array in lines.rows(0, 9).items():
        np.testing.assert_array_equal(tables.rows(0, 9)[name], array)


class Recorded(io.FileIO):
    """A file that records how much is read of it at once."""

    largest = 0

    def read(self, size=-1):
        found = super().read(size)
        self.largest = max(self.largest, len(found))
        return found


def test_one_large_row_group_is_read_piece_by_piece(tmp_path):
    text = "All work and no play. " * 50
    rows = [{"messages": [{"role": "user", "content": f"{n} {text}"}]} for n in range(20_000)]
    size = Path(write(tmp_path / "a.parquet", rows, compression="none")).stat().st_size
    assert size > 20e6 and parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    advances = []
    with Recorded(tmp_path / "a.parquet") as file:
        found = list(reader.read_rows(file, "a.parquet", ["text", "messages"], size, advances.append))
    assert [json.loads(row) for row in found] == rows
    assert file.largest < size / 4
    assert len(advances) == 20 and size * 0.99 < sum(advances) <= size


def test_unreadable_files_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, [{"question": "x", "id": 3}])
    with pytest.raises(InputError, match=r"a\.parquet has the columns question, id, image; name the one with the text"):
        list(open_text(str(path), "text").pieces())
    write(path, [{"text": "one"}, {"text": None}])
    with pytest.raises(InputError, match=r"a\.parquet:2 has no text in a field 'text' \(the line has no fields\)"):
        list(open_text(str(path), "text").pieces())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.parquet cannot be read: "):
        list(open_text(str(path), "text").pieces())
