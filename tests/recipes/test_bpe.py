"""Byte-pair encoding: GPT-2's numbers, the same tokens however the text is cut, a run's tokenizer found again."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2 import bpe
from tpuswarm.recipes.gpt2 import text as texts
from tpuswarm.recipes.gpt2.bpe import Bpe, read_bpe, read_gpt2_files, train_bpe, whole_words
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.gpt2.tokens import prepare_tokens

GOLDEN = Path(__file__).with_name("golden")
MODEL = GOLDEN / "model"
CORPUS = "It's the dog's bone; they'd say it isn't.\n\n    indented twice\tand 1,234 naïve 中文 🙂\n" * 40
HARD = st.text(st.sampled_from(" \n\t\x1c\x85\u00a0\u2003ab'slt12中🙂.!"), max_size=60)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def golden() -> Bpe:
    return read_bpe(MODEL / "tokenizer.json")


def test_numbers_are_those_of_transformers(golden):
    wanted = json.loads((GOLDEN / "tokens.json").read_text())
    assert {text: golden.encode(text).tolist() for text in wanted} == wanted
    assert all(golden.decode(ids) == text for text, ids in wanted.items())


def test_the_released_form_is_the_same_tokenizer(golden):
    released = read_gpt2_files(MODEL / "vocab.json", MODEL / "merges.txt")
    assert released.key == golden.key and released.vocab == golden.vocab
    facts = json.loads(golden.text)
    facts["model"]["merges"] = [" ".join(pair) for pair in facts["model"]["merges"]]  # as older files have them
    del facts["pre_tokenizer"]["use_regex"]
    assert Bpe(json.dumps(facts), "older").key == golden.key
    facts["model"]["merges"].pop()
    assert Bpe(json.dumps(facts), "another").key != golden.key


@given(HARD, st.lists(st.integers(0, 60)))
def test_pieces_have_the_tokens_of_the_whole(text, places):
    """The library on the whole text is the oracle."""
    whole = read_bpe(MODEL / "tokenizer.json")
    cuts = sorted({0, *(place for place in places if place < len(text)), len(text)})
    pieces = list(whole_words(text[a:b] for a, b in pairwise(cuts)))
    assert "".join(pieces) == text
    cut = [number for piece in pieces for number in whole.encode(piece).tolist()]
    assert cut == whole._library.encode(text, add_special_tokens=False).ids


def test_small_pieces_make_the_same_tokenizer_and_tokens(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(CORPUS)
    whole = prepare_tokens(str(tmp_path / "text.txt"), "bpe", vocab=320)
    monkeypatch.setattr(texts, "PIECE", 7)
    monkeypatch.setattr(bpe, "CHUNK", 3)
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "other"))
    cut = prepare_tokens(str(tmp_path / "text.txt"), "bpe", vocab=320)
    assert cut.tokenizer.key == whole.tokenizer.key and cut.digest == whole.digest
    assert len(whole.array) < len(CORPUS.encode()) / 1.5  # it merges
    assert whole.tokenizer.decode(whole.array.tolist()) == CORPUS


def test_a_recipe_finds_its_tokenizer_again(tmp_path):
    """Beside its tokens, in its run when they are gone, and never another one."""
    path = tmp_path / "text.txt"
    path.write_text(CORPUS)
    recipe = GPT2(data=str(path), tokenizer="bpe", vocab=320)
    options, run = recipe.options(), tmp_path / "run"
    assert options["tokenizer"] == "bpe" and options["vocab"] == 320 and len(options["tokenizer_digest"]) == 64
    run.mkdir()
    recipe.keep(run)
    assert GPT2(**options).options() == options
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1  # not made a second time for the known one
    other = tmp_path / "other.txt"
    other.write_text("zebras zigzag; " * 200)
    with pytest.raises(
        InputError, match=r"a BPE trained on .*other.txt .* is not the tokenizer asked for .* is tokenizer.json"
    ):
        GPT2(**{**options, "data": str(other)}).data("all")
    again = GPT2(**{**options, "data": str(other)})
    again.home = run
    assert again.tokenizer.key == options["tokenizer_digest"]
    assert again.tokenizer.decode(again.data("all").rows(0, 1)["tokens"][0].tolist()) in other.read_text()
    (run / "tokenizer.json").write_text((MODEL / "tokenizer.json").read_text())
    swapped = GPT2(**options)
    swapped.home = run
    with pytest.raises(InputError, match=r"run/tokenizer.json is not the tokenizer of this run"):
        swapped.options()


def test_members_of_a_swarm_get_it_with_the_tokens(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(CORPUS)
    recipe = GPT2(data=str(tmp_path / "text.txt"), tokenizer="bpe", vocab=320)
    shared = recipe.share(tmp_path / "run" / "data")
    (tmp_path / "text.txt").unlink()
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "of-another-machine"))
    member = GPT2(**{**recipe.options(), **shared})
    assert member.tokenizer.key == recipe.tokenizer.key and member.config == recipe.config
    np.testing.assert_array_equal(*(each.data("train").rows(3, 5)["tokens"] for each in (member, recipe)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizes the text first, with Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits text with"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}, "add_prefix_space"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "its model is WordLevel"),
        ({"version": "x"}, "is not a tokenizer"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "256 of the 256 bytes have no token"),
    ],
)
def test_another_kind_of_tokenizer_is_refused(golden, change, words):
    with pytest.raises(InputError, match=words):
        Bpe(json.dumps(json.loads(golden.text) | change), "theirs")


def test_tokenizers_that_cannot_be(tmp_path):
    with pytest.raises(InputError, match="a BPE needs a vocabulary of at least 257, not 100"):
        train_bpe([CORPUS], 100)
    with pytest.raises(InputError, match=r"unknown tokenizer 'gtp2'; did you mean gpt2.*hf:ORG/NAME"):
        GPT2(tokenizer="gtp2")
    shutil.copy(MODEL / "config.json", tmp_path)
    with pytest.raises(InputError, match=r"hf:.* has no BPE; use --tokenizer gpt2"):
        GPT2(tokenizer=f"hf:{tmp_path}").options()
