"""Byte-pair encoding: GPT-2's numbers, the same tokens however the text is cut, a run's tokenizer found again."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language import text as texts
from tpuswarm.recipes.language import tokenizer
from tpuswarm.recipes.language.tokenizer import Bpe, read_bpe, read_gpt2_files, split_at_words, train_bpe
from tpuswarm.recipes.language.tokens import prepare_tokens

GOLDEN = Path(__file__).with_name("golden")
MODEL = GOLDEN / "model"
TOKENIZER = read_bpe(MODEL / "tokenizer.json")
CORPUS = "It's the dog's bone; they'd say it isn't.\n\n    indented twice\tand 1,234 naïve 中文 🙂\n" * 40
HARD = st.text(st.sampled_from(" \n\t\x1c\x85\u00a0\u2003ab'slt12中🙂.!"), max_size=60)


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(CORPUS)
    return path


def test_numbers_are_those_of_transformers():
    expected = json.loads((GOLDEN / "tokens.json").read_text())
    assert {text: TOKENIZER.encode(text).tolist() for text in expected} == expected
    assert all(TOKENIZER.decode(numbers) == text for text, numbers in expected.items())


def test_released_and_older_files_are_the_same_tokenizer():
    released = read_gpt2_files(MODEL / "vocab.json", MODEL / "merges.txt")
    assert released.key == TOKENIZER.key and released.vocab == TOKENIZER.vocab
    older = json.loads(TOKENIZER.text)
    older["model"]["merges"] = [" ".join(pair) for pair in older["model"]["merges"]]
    del older["pre_tokenizer"]["use_regex"]
    assert Bpe(json.dumps(older), "older").key == TOKENIZER.key
    older["model"]["merges"].pop()
    assert Bpe(json.dumps(older), "another").key != TOKENIZER.key


@given(HARD, st.lists(st.integers(0, 60)))
def test_pieces_have_the_tokens_of_the_whole(text, places):
    cuts = sorted({0, *(place for place in places if place < len(text)), len(text)})
    pieces = list(split_at_words(text[a:b] for a, b in pairwise(cuts)))
    assert "".join(pieces) == text
    tokens = [number for piece in pieces for number in TOKENIZER.encode(piece).tolist()]
    assert tokens == TOKENIZER._library.encode(text, add_special_tokens=False).ids


def other_tokenizers():
    """Tokenizers like those of Llama 3 and Qwen, Gemma, Llama 2, and SmolLM."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    words += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    byte_level = Library(models.BPE())
    byte_level.normalizer = normalizers.NFC()
    byte_level.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    byte_level.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_level.train_from_iterator(
        [CORPUS],
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end_of_text|>", "<|begin_of_text|>"]
        ),
    )
    byte_level.post_processor = processors.TemplateProcessing(
        "<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 1)]
    )
    yield byte_level
    digits = Library(models.BPE())  # GPT-2's pattern looks ahead in white space
    digits.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    digits.decoder = decoders.ByteLevel()
    digits.train_from_iterator(
        [CORPUS], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    for marks in ([], [normalizers.Prepend("\u2581")]):
        pieces = Library(models.BPE(byte_fallback=True, fuse_unk=True))
        pieces.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "\u2581")])
        pieces.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        pieces.train_from_iterator(
            CORPUS.splitlines(), trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<eos>", *fallback])
        )
        yield pieces
    yield digits


OTHERS = [Bpe(library.to_str(), "theirs") for library in other_tokenizers()]


@pytest.mark.parametrize("bpe", OTHERS, ids=["llama-3", "gemma", "llama-2", "smollm"])
@given(text=HARD, places=st.lists(st.integers(0, 60)))
@example(text="a\n\nb", places=[3])
@example(text="a\nb\n c\nd", places=[2, 4, 7])
def test_other_tokenizers_pieces_have_the_tokens_of_the_whole_too(bpe, text, places):
    cuts = sorted({0, *(place for place in places if place < len(text)), len(text)})
    numbers = bpe.encode_pieces(text[a:b] for a, b in pairwise(cuts))
    tokens = [number for piece in numbers for number in piece.tolist()]
    assert tokens == bpe._library.encode(text, add_special_tokens=False).ids


def test_documents_begin_and_end_as_the_tokenizer_says():
    llama, gemma, *_ = OTHERS
    assert (llama.begin_text, llama.end_text) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert (gemma.begin_text, gemma.end_text) == ("", "<eos>")


@pytest.mark.parametrize("bpe", OTHERS, ids=["llama-3", "gemma", "llama-2", "smollm"])
def test_large_text_is_encoded_in_small_pieces(bpe):
    sizes = [len(numbers) for numbers in bpe.encode_pieces(CORPUS for _ in range(20))]
    assert max(sizes) < sum(sizes) / 10


def test_small_pieces_make_the_same_tokenizer_and_tokens(corpus, tmp_path, monkeypatch):
    whole = prepare_tokens(str(corpus), "bpe", vocab=320)
    monkeypatch.setattr(texts, "PIECE_BYTES", 7)
    monkeypatch.setattr(tokenizer, "CHUNK_CHARS", 3)
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "other"))
    cut = prepare_tokens(str(corpus), "bpe", vocab=320)
    assert cut.tokenizer.key == whole.tokenizer.key and cut.digest == whole.digest
    assert len(whole.array) < len(CORPUS.encode()) / 1.5  # it merges
    assert whole.tokenizer.decode(whole.array.tolist()) == CORPUS


def test_recipe_finds_its_tokenizer_again(corpus, tmp_path):
    """Beside its tokens, in its run when they are gone, and never another one."""
    recipe = GPT2(data=str(corpus), tokenizer="bpe", vocab=320)
    options, run = recipe.options(), tmp_path / "run"
    assert options["tokenizer"] == "bpe" and options["vocab"] == 320 and len(options["tokenizer_digest"]) == 64
    run.mkdir()
    recipe.keep(run)
    assert GPT2(**options).options() == options
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1, "not trained a second time"

    other = tmp_path / "other.txt"
    other.write_text("zebras zigzag; " * 200)
    words = r"a BPE trained on .*other.txt .* is not the tokenizer asked for .* is tokenizer.json"
    with pytest.raises(InputError, match=words):
        GPT2(**{**options, "data": str(other)}).data("all")
    again = GPT2(**{**options, "data": str(other)})
    again.home = run
    assert again.tokenizer.key == options["tokenizer_digest"]
    assert again.tokenizer.decode(again.data("all").rows(0, 1)["tokens"][0].tolist()) in other.read_text()

    shutil.copy(MODEL / "tokenizer.json", run)
    swapped = GPT2(**options)
    swapped.home = run
    with pytest.raises(InputError, match=r"run/tokenizer.json is not the tokenizer of this run"):
        swapped.options()


def test_members_of_a_swarm_get_the_tokenizer_with_the_tokens(corpus, tmp_path, monkeypatch):
    recipe = GPT2(data=str(corpus), tokenizer="bpe", vocab=320)
    shared = recipe.share(tmp_path / "run" / "data")
    corpus.unlink()
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "of-another-machine"))
    member = GPT2(**{**recipe.options(), **shared})
    assert member.tokenizer.key == recipe.tokenizer.key and member.config == recipe.config
    np.testing.assert_array_equal(*(made.data("train").rows(3, 5)["tokens"] for made in (member, recipe)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "it does not work on bytes"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "its model is WordLevel"),
        ({"version": "x"}, "is not a tokenizer"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "256 of the 256 bytes have no token"),
    ],
)
def test_other_kind_of_tokenizer_is_refused(change, words):
    with pytest.raises(InputError, match=words):
        Bpe(json.dumps(json.loads(TOKENIZER.text) | change), "theirs")


def test_impossible_or_missing_tokenizer_is_reported(tmp_path):
    with pytest.raises(InputError, match="a BPE needs a vocabulary of at least 257, not 100"):
        train_bpe([CORPUS], 100)
    with pytest.raises(InputError, match=r"unknown tokenizer 'gtp2'; did you mean gpt2.*hf:ORG/NAME"):
        GPT2(tokenizer="gtp2")
    shutil.copy(MODEL / "config.json", tmp_path)
    with pytest.raises(InputError, match=r"hf:.* has no tokenizer.json, and no vocab.json .*; use --tokenizer hf:"):
        GPT2(tokenizer=f"hf:{tmp_path}").options()
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}}')
    with pytest.raises(InputError, match=r"hf:.* has characters as its tokens; use --tokenizer hf:"):
        GPT2(tokenizer=f"hf:{tmp_path}").options()
