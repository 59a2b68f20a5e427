"""Text as tokens: from files, folders, URLs and buckets, prepared once, in rows that cover it."""

import hashlib
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.swarm.bucket import bucket
from tests.web import serve_folder
from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language import text as texts
from tpuswarm.recipes.language.text import open_text
from tpuswarm.recipes.language.tokenizer import Bytes, Characters
from tpuswarm.recipes.language.tokens import TokenSource, prepare_tokens
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.storage import stored_files
from tpuswarm.train.storage.bucket import Bucket

PLAY = "To be, or not to be: that is the question.\n" * 30


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def play(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text(PLAY)
    return path


@given(st.text(min_size=1))
def test_decoding_restores_the_text(text):
    text = text.encode(errors="replace").decode()
    for tokenizer in (Bytes(), Characters("".join(sorted(set(text))))):
        numbers = tokenizer.encode(text)
        assert tokenizer.decode(numbers.tolist()) == text
        assert numbers.max() < tokenizer.vocab


def test_unknown_characters_are_named():
    with pytest.raises(
        InputError, match=r"has characters outside this model's alphabet of 3: 'z' 'é' \(2 in all\).*bytes"
    ):
        Characters("abc").encode("abczzé")


def test_file_becomes_tokens_and_damaged_tokens_are_refused(play):
    tokens = prepare_tokens(str(play), "characters")
    assert tokens.array.dtype == np.uint16 and tokens.tokenizer.alphabet == "".join(sorted(set(PLAY)))
    assert tokens.tokenizer.decode(tokens.array.tolist()) == PLAY
    assert tokens.digest == hashlib.sha256(tokens.array.tobytes()).hexdigest()

    file = tokens.folder / "tokens.bin"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(InputError, match=r"tokens.bin has changed since it was written: its digest is .*; delete "):
        prepare_tokens(str(play), "characters")
    shutil.rmtree(tokens.folder)
    assert prepare_tokens(str(play), "characters").digest == tokens.digest


def test_pieces_that_cut_characters_make_the_same_tokens(play, tmp_path, monkeypatch):
    play.write_text("äöü€𝄞" * 50)
    whole = prepare_tokens(str(play), "characters")
    monkeypatch.setattr(texts, "PIECE_BYTES", 3)
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "other"))
    cut = prepare_tokens(str(play), "characters")
    assert cut.digest == whole.digest and cut.tokenizer.key == whole.tokenizer.key


def test_folder_is_its_files_in_order_without_hidden_ones(tmp_path):
    for name, content in (("b.txt", "second "), ("a/deep.txt", "first "), (".hidden", "no"), ("empty.txt", "")):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(content)
    assert "".join(open_text(str(tmp_path / "data")).pieces()) == "first second "


@pytest.mark.parametrize("path", ["../play.txt", ".cache/play.txt", ".cache/../../texts"])
def test_named_path_is_read_whatever_folders_lead_to_it(tmp_path, monkeypatch, path):
    monkeypatch.chdir((tmp_path / "here").mkdir() or tmp_path / "here")
    for name in ("../play.txt", ".cache/play.txt", "../texts/play.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    assert "".join(open_text(path).pieces()).endswith("play.txt")


def test_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("one ", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n', encoding="utf-8-sig")
    assert "".join(open_text(str(tmp_path), "text").pieces()).split() == ["one", "two"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_named_with_the_command_that_converts_it(tmp_path, encoding):
    file = tmp_path / "a.txt"
    file.write_text("To be, or not", encoding=encoding)
    name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    with pytest.raises(InputError, match=f"is {name}, not UTF-8 text: convert it with `iconv -f {name} -t UTF-8 a.txt"):
        list(open_text(str(file)).pieces())


def test_default_text_is_pythons_own_source():
    text = open_text(None)
    assert any(file.endswith("/ast.py") for file in text.files) and sum(text.sizes) > 10**6


def test_file_replaced_with_its_size_and_time_is_read_again(play, tmp_path):
    first = prepare_tokens(str(play), "bytes")
    (tmp_path / "other").write_text(PLAY.swapcase())
    shutil.copystat(play, tmp_path / "other")
    subprocess.run(["cp", "-p", tmp_path / "other", play], check=True)  # the inode stays, too
    assert prepare_tokens(str(play), "bytes").digest != first.digest


@pytest.mark.parametrize(
    ("before", "after", "is_cached"),
    [
        (None, None, False),  # Last-Modified of this second
        ({"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, {"Last-Modified": "Mon, 01 Jan 2024 00:00:01 GMT"}, True),
        ({"Last-Modified": "yesterday"}, {"Last-Modified": "yesterday"}, False),
        ({"ETag": '"1"'}, {"ETag": '"2"'}, True),
        ({"ETag": 'W/"1"'}, {"ETag": 'W/"1"'}, False),
        ({"Content-MD5": "one"}, {"Content-MD5": "two"}, True),
        ({"Digest": "sha-256=one"}, {"Digest": "sha-256=two"}, True),
        ({}, {}, False),
    ],
)
def test_url_is_cached_only_while_its_server_says_that_it_is_unchanged(play, cache, before, after, is_cached):
    counts = Counter()
    with serve_folder(play.parent, headers := before and dict(before), counts) as url:
        first = prepare_tokens(f"{url}/play.txt", "bytes")
        requests = counts["GET"]
        assert prepare_tokens(f"{url}/play.txt", "bytes").folder == first.folder
        assert is_cached == (counts["GET"] < 2 * requests) and len(list(cache.iterdir())) == 1
        play.write_text(PLAY.swapcase())
        if headers is not None:
            headers |= after
        assert prepare_tokens(f"{url}/play.txt", "bytes").digest != first.digest


def test_store_without_versions_is_read_again():
    for text in (PLAY, PLAY.swapcase()):
        fsspec.filesystem("memory").pipe("/play.txt", text.encode())
        tokens = prepare_tokens("memory://play.txt", "bytes")
        assert bytes(tokens.array.astype(np.uint8)).decode() == text


PREPARE = (
    "import sys;from tpuswarm.recipes.language.tokens import *;print(prepare_tokens(sys.argv[1],'characters').digest)"
)


def test_processes_that_prepare_at_once_agree(play, cache):
    play.write_text(PLAY * 5000)
    command = [sys.executable, "-c", PREPARE, str(play)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    digests = {process.communicate(timeout=240)[0] for process in running}
    assert len(digests) == 1 and len(digests.pop().strip()) == 64
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"PNG\0\0\1\2", "is binary, not text; use --tokenizer bytes"),
        (b"too short", "9 tokens|fewer than one row of context 64"),
        (b"good text " * 100 + b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_unusable_data_is_reported(play, cache, content, words):
    play.write_bytes(content)
    with pytest.raises(InputError, match=words):
        GPT2(data=str(play)).data("train")
    assert content == b"too short" or not (cache.exists() and list(cache.iterdir())), "half a preparation is left"


def test_missing_data_is_reported(play):
    for place in ("no/such/file.txt", "nosuchprotocol://x/y", "/tmp/none/*.txt"):
        with pytest.raises(InputError, match=r"there is no file|cannot be read"):
            open_text(place)
    text = open_text(str(play))
    play.unlink()
    with pytest.raises(InputError, match=r"there is no file or folder .*play\.txt; --data takes"):
        list(text.pieces())
    with pytest.raises(InputError, match="is empty"):
        open_text(str(play.parent))


@given(st.integers(9, 400), st.integers(1, 8), st.integers(0, 3), st.integers(0, 5))
def test_epoch_reads_disjoint_windows_that_cover_the_text(length, context, seed, epoch):
    source = TokenSource(np.arange(length, dtype=np.uint16), context, seed, "", "text")
    n = source.rows_per_epoch
    rows = source.rows(epoch * n, n)["tokens"]
    assert rows.dtype == np.int32 and rows.shape == (n, context + 1)
    assert (np.diff(rows, axis=1) == 1).all()
    targets = rows[:, 1:].ravel()
    assert len(set(targets)) == len(targets), "each token at most once"
    assert length - len(targets) <= 2 * context, "all but a rest at the ends"


def test_epochs_start_at_different_places():
    source = TokenSource(np.arange(1000, dtype=np.uint16), 10, 0, "", "text")
    n = source.rows_per_epoch
    assert len({int(source.rows(epoch * n, n)["tokens"].min()) for epoch in range(30)}) > 5


def test_alphabet_is_stored_in_the_options_and_checked(play, tmp_path, cache):
    recipe = GPT2(data=str(play))
    again = GPT2(**recipe.options())
    assert again.data("train").digest == recipe.data("train").digest
    assert len(list(cache.iterdir())) == 1, "not prepared a second time for the known alphabet"
    assert again.options() == recipe.options() and again.config == recipe.config
    (tmp_path / "other.txt").write_text(PLAY + "ß")
    with pytest.raises(InputError, match="'ß'"):
        GPT2(**{**recipe.options(), "data": str(tmp_path / "other.txt")}).data("all")
    with pytest.raises(InputError, match="needs a vocabulary of"):
        GPT2(data=str(play), vocab=5).config


def test_text_in_a_bucket_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_files, "READ_BYTES", 4)
    with bucket("data", tmp_path) as storage:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage.endpoint)
        for name, text in (("a.txt", b"first "), ("b.txt", b"second")):
            Store("gs://data/text").create(name, text)
        Bucket("gs://data").put("text/.hidden", b"no")
        Bucket("gs://data").put("text-other/c.txt", b"third")
        for place, words in (("gs://data/text", "first second"), ("gs://data/text/b.txt", "second")):
            storage.faults = ["fine", "503"]
            assert "".join(open_text(place).pieces()) == words
        for place in ("gs://data/text/c.txt", "gs://"):
            with pytest.raises(InputError, match=f"there is no file or folder {place}; --data takes"):
                open_text(place)
        with pytest.raises(InputError, match="gs://nowhere/text cannot be read: gs://nowhere: there is no such bucket"):
            open_text("gs://nowhere/text")
        text = open_text("gs://data/text")
        storage.faults = ["corrupt"]
        with pytest.raises(InputError, match=r"gs://data/text/a.txt was damaged in transit"):
            list(text.pieces())
        Bucket("gs://data/text").delete("a.txt")
        with pytest.raises(InputError, match=r"gs://data/text/a\.txt was replaced or deleted while it was read"):
            list(text.pieces())


def test_unreachable_storage_is_reported_soon(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr("tpuswarm.train.storage.bucket.FIRST_RETRY_FOR_S", 0.1)
    with pytest.raises(InputError, match=r"^gs://nowhere/text cannot be read: .* 127\.0\.0\.1 does not answer;"):
        open_text("gs://nowhere/text")


def test_slow_place_is_named_while_it_is_waited_for(monkeypatch):
    waited_for = []

    @contextmanager
    def waiting(what):
        waited_for.append(what)
        yield

    class Far:
        protocol = "far"

        def invalidate_cache(self):
            pass

        def isdir(self, path):
            assert waited_for == ["waiting for far://text"]
            raise LookupError("no answer\nfrom far")

    monkeypatch.setattr("fsspec.core.url_to_fs", lambda place: (Far(), "text"))
    monkeypatch.setattr("tpuswarm.recipes.language.text.waiting", waiting)
    with pytest.raises(InputError, match=r"^far://text cannot be read: no answer from far$"):
        open_text("far://text")
