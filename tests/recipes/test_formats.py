"""Data in other forms than plain text: compressed, nanoGPT's tokens, and what is refused with the way out."""

import bz2
import gzip
import lzma
import pickle
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.web import serve_folder
from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language import text as texts
from tpuswarm.recipes.language.hub import open_published
from tpuswarm.recipes.language.published_tokenizer import read_tokenizer
from tpuswarm.recipes.language.text import open_text
from tpuswarm.recipes.language.tokens import prepare_tokens

if find_spec("compression"):
    from compression import zstd
else:
    from backports import zstd

PLAY = "To be, or not to be: that is the question – ob's edler im Gemüt.\n" * 30
COMPRESS = {"gz": gzip.compress, "zst": zstd.compress, "bz2": bz2.compress, "xz": lzma.compress}
ALPHABET = "".join(sorted(set(PLAY)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", COMPRESS)
@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_compressed_text_is_the_text(tmp_path, name, tokenizer, monkeypatch):
    monkeypatch.setattr(texts, "PIECE_BYTES", 600)
    (tmp_path / "play.txt").write_text(PLAY)
    half, compress = PLAY.encode(), COMPRESS[name]
    (tmp_path / f"play.txt.{name}").write_bytes(compress(half[:500]) + compress(half[500:]))
    (tmp_path / "no-ending").write_bytes(compress(half))
    digest = prepare_tokens(str(tmp_path / "play.txt"), tokenizer).digest
    assert prepare_tokens(str(tmp_path / f"play.txt.{name}"), tokenizer).digest == digest
    with serve_folder(tmp_path) as url:
        assert prepare_tokens(f"{url}/no-ending", tokenizer).digest == digest


def test_compressed_json_lines_are_documents(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    assert "".join(open_text(str(tmp_path), "text").pieces(end="|")) == "one|two"


def test_compressed_file_that_is_cut_off_is_named(tmp_path):
    for name, compress in COMPRESS.items():
        (tmp_path / name).write_bytes(compress(PLAY.encode())[:-9])
        with pytest.raises(InputError, match=rf"{name} is cut off; copy it again"):
            prepare_tokens(str(tmp_path / name), "bytes")


UNREADABLE = {
    "parquet": (b"PAR1\x15\x04\x15", "data is a Parquet table; end its name with .parquet"),
    "zip": (b"PK\x03\x04\x14\0", "data is an archive; unpack it, and give the folder"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0", "data is an archive; unpack it"),
    "lz4": (b"\x04\x22\x4d\x18\x64", "data is compressed in a form that is not read; decompress it"),
    "twice": (gzip.compress(zstd.compress(b"text")), "data is compressed twice; decompress it"),
    "pickle": (pickle.dumps({"itos": {0: "a"}}), "data is a Python pickle, not text; give the folder that nanoGPT"),
    "llm.c": (
        np.array([20240520, 1, 9], "<i4").tobytes(),
        r"llm\.c's tokens; `tail -c \+1025 FILE > train\.bin` makes",
    ),
}


@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_other_formats_are_refused_with_the_way_out(tmp_path, tokenizer, kind):
    content, words = UNREADABLE[kind]
    (tmp_path / "data").write_bytes(content)
    with pytest.raises(InputError, match=words):
        prepare_tokens(str(tmp_path / "data"), tokenizer)


def test_tar_of_text_is_refused_also_compressed(tmp_path):
    (tmp_path / "a.txt").write_text(PLAY)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "a.txt", "a.txt")
    with pytest.raises(InputError, match=r"a\.tar\.gz is an archive; unpack it, and give the folder"):
        prepare_tokens(str(tmp_path / "a.tar.gz"), "bytes")


@pytest.mark.parametrize("text", ["ORCHARDS and PAR1S.", "BZh9 is a name.", "PK, Obj and %PDF"])
def test_text_that_begins_like_another_format_is_read(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert "".join(open_text(str(tmp_path / "a.txt")).pieces()) == text


@pytest.fixture
def nanogpt(tmp_path):
    """A folder as nanoGPT's data/shakespeare_char/prepare.py leaves it."""
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    numbers = np.array([ALPHABET.index(character) for character in PLAY], np.uint16)
    numbers[:1700].tofile(folder / "train.bin")
    numbers[1700:].tofile(folder / "val.bin")
    stoi = {character: number for number, character in enumerate(ALPHABET)}
    meta = {"vocab_size": len(ALPHABET), "itos": dict(enumerate(ALPHABET)), "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    (folder / "prepare.py").write_text("import pickle")
    (folder / "input.txt").write_text(PLAY)
    return folder


def test_nanogpts_folder_is_trained_on_its_tokens_and_held_out_ones(nanogpt):
    recipe = GPT2(data=str(nanogpt), context=32)
    assert recipe.config.vocab == len(ALPHABET)
    train, held_out = recipe.data("train"), recipe.data("validation")
    assert recipe.tokenizer.decode(train._array.tolist()) == PLAY[:1700]
    assert recipe.tokenizer.decode(held_out._array.tolist()) == PLAY[1700:]
    again = GPT2(**recipe.options())
    assert again.data("train").digest == train.digest
    numbers = np.concatenate([train._array, held_out._array])
    numbers[:1600].tofile(nanogpt / "train.bin")
    numbers[1600:].tofile(nanogpt / "val.bin")
    assert GPT2(**recipe.options()).data("train").digest != train.digest, "the same tokens, held out differently"
    assert len(GPT2(data=str(nanogpt), held_out=0.5).data("train")._array) == len(PLAY) - len(PLAY) // 2


def test_nanogpts_tokens_need_the_tokenizer_that_made_them(nanogpt):
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(InputError, match=r"tokens of characters \(by meta\.pkl\), not of .*--tokenizer characters"):
            GPT2(data=str(nanogpt), tokenizer=tokenizer).data("train")
    with pytest.raises(InputError, match=r"an alphabet of \d+ characters, another one than this model's of 3"):
        GPT2(data=str(nanogpt), alphabet="abc").data("train")
    for tokenizer in ("bytes", "characters", "bpe"):
        with pytest.raises(InputError, match=rf"without meta\.pkl, so not of {tokenizer}; .* --tokenizer gpt2"):
            GPT2(data=str(nanogpt / "train.bin"), tokenizer=tokenizer).data("train")


def test_nanogpts_tokens_of_a_published_model_are_read(tmp_path):
    place = f"hf:{Path(__file__).with_name('golden') / 'model'}"
    tokenizer = read_tokenizer(open_published(place))
    tokenizer.encode(PLAY).astype(np.uint16).tofile(tmp_path / "train.bin")
    recipe = GPT2(data=str(tmp_path), tokenizer=place)
    assert recipe.tokenizer.decode(recipe.data("all")._array.tolist()) == PLAY
    assert len(recipe.data("validation")._array) == len(tokenizer.encode(PLAY)) // 10, "nothing else is held out"


class Harmful:
    def __reduce__(self):
        return print, ("this code was run",)


def test_damaged_files_of_nanogpt_are_named_and_run_no_code(nanogpt, capfd):
    whole = (nanogpt / "meta.pkl").read_bytes()
    for content in (whole[:40], pickle.dumps(Harmful()), pickle.dumps({"itos": {0: "ab"}}), b"", pickle.dumps([])):
        (nanogpt / "meta.pkl").write_bytes(content)
        with pytest.raises(InputError, match=r"meta\.pkl (has no list of characters|is empty)|without meta\.pkl"):
            GPT2(data=str(nanogpt)).data("train")
    assert "this code was run" not in capfd.readouterr().out
    (nanogpt / "meta.pkl").write_bytes(whole)
    (nanogpt / "val.bin").write_bytes(b"odd")
    with pytest.raises(InputError, match=r"val\.bin is cut off: it has an odd number of bytes"):
        GPT2(data=str(nanogpt)).data("train")
    np.array([999], np.uint16).tofile(nanogpt / "val.bin")
    with pytest.raises(InputError, match=r"val\.bin has the token 999, but this tokenizer \(characters\) has"):
        GPT2(data=str(nanogpt)).data("train")


def test_parquet_without_its_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1\x15")
    with pytest.raises(InputError, match=r"a\.parquet needs a package .* pip install 'tpuswarm\[parquet\]'"):
        GPT2(data=str(tmp_path / "a.parquet"), context=8).data("train")
