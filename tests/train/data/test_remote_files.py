"""A text on another machine gives the same rows, and only these travel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.recipes.language.tokens import TokenSource
from tpuswarm.train.data import remote_files
from tpuswarm.train.data.remote_files import RemoteArray, RemoteFile

TOKENS = np.random.default_rng(0).integers(0, 2**16, 5000, np.uint16)


class Server:
    def __init__(self, path):
        self.bytes = self.requests = self.downloads = 0
        self.file = RemoteFile(path, self.read, self.download)

    def read(self, starts, length):
        self.requests += 1
        self.bytes += len(starts) * length
        content = TOKENS.view(np.uint8)
        return np.stack([content[start : start + length] for start in starts])

    def download(self):
        self.downloads += 1
        self.file.path.write_bytes(TOKENS.tobytes())


@given(st.data(), st.integers(1, 40), st.integers(0, 3))
def test_rows_are_those_of_the_whole_file(tmp_path_factory, data, context, seed):
    server = Server(tmp_path_factory.getbasetemp() / "never-written")
    whole, cut = RemoteArray(server.file, np.uint16, 0, len(TOKENS)), 4321
    there = TokenSource(whole[:cut], context, seed, "digest", "text")
    here = TokenSource(TOKENS[:cut], context, seed, "digest", "text")
    start = 0
    for _ in range(8):
        start += data.draw(st.sampled_from([0, 0, 7, 500, 3000]))
        count = data.draw(st.integers(1, 30))
        assert np.array_equal(there.rows(start, count)["tokens"], here.rows(start, count)["tokens"])
        start += count
    assert not server.downloads


def test_rows_in_order_are_fetched_once_and_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuswarm.recipes.language.tokens.READ_AHEAD_ROWS", 64)
    server = Server(tmp_path / "tokens")
    source = TokenSource(RemoteArray(server.file, np.uint16, 0, len(TOKENS)), 10, 0, "digest", "text")
    for step in range(40):
        source.rows(step * 8, 8)
    assert server.requests <= 2 + 40 * 8 // 32 + 1
    assert server.bytes <= (40 * 8 + 2 * 64) * 11 * 2


def test_requests_have_a_moderate_size(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_files, "MAX_REQUEST_BYTES", 100)
    server = Server(tmp_path / "tokens")
    array = RemoteArray(server.file, np.uint16, 0, len(TOKENS))
    rows = array.windows(np.arange(20), 10, np.arange(0))
    assert server.requests == 4 and np.array_equal(rows, [TOKENS[n : n + 10] for n in range(20)])


def test_anything_else_downloads_the_file_once(tmp_path):
    server = Server(tmp_path / "tokens")
    array = RemoteArray(server.file, np.uint16, 0, len(TOKENS))
    assert np.array_equal(np.unique(array[100:300]), np.unique(TOKENS[100:300]))
    assert np.asarray(array).sum() == TOKENS.sum() and server.downloads == 1
    with pytest.raises(ValueError, match="contiguous"):
        array[::2]
