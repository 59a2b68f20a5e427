"""Documents of a text: separators between them, JSON lines that hold them, and the part that is held out."""

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from tpuswarm.errors import InputError, NoSuchSplit
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language import text as texts
from tpuswarm.recipes.language.tokenizer import END_OF_TEXT

MODEL = f"hf:{Path(__file__).with_name('golden') / 'model'}"
FIRST, SECOND = "The first of them.\n" * 20, "  And another one. " * 20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """Two files of several pieces."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text(FIRST)
    (tmp_path / "data" / "b.txt").write_text(SECOND)
    return tmp_path / "data"


def json_lines(path: Path, *documents: str, field: str = "text") -> str:
    path.write_text("".join(json.dumps({field: document, "id": 7}) + "\n" for document in documents))
    return str(path)


def text_of(recipe: GPT2) -> str:
    return recipe.tokenizer.decode(recipe._tokens.array.tolist())


@pytest.mark.parametrize("piece", [7, 2**22])
def test_separator_between_files_is_one_token_of_the_tokenizer(folder, monkeypatch, piece):
    monkeypatch.setattr(texts, "PIECE_BYTES", piece)
    recipe = GPT2(data=str(folder), tokenizer=MODEL)
    tokens, end = recipe._tokens.array.tolist(), recipe.tokenizer.end
    assert tokens == [*recipe.tokenizer.encode(FIRST), end, *recipe.tokenizer.encode(SECOND)]
    joined = GPT2(data=str(folder), tokenizer=MODEL, separator="none")
    assert text_of(joined) == FIRST + SECOND and END_OF_TEXT in text_of(recipe)
    assert GPT2(data=str(folder)).options() == GPT2(**GPT2(data=str(folder)).options()).options()
    assert joined.options()["separator"] == "none" and text_of(GPT2(data=str(folder))) == FIRST + SECOND


def test_separator_is_not_part_of_what_a_tokenizer_is_trained_on(folder):
    recipe = GPT2(data=str(folder), tokenizer="bpe", vocab=300)
    assert recipe._tokens.array.tolist().count(recipe.tokenizer.end) == 1
    assert not any(
        "endof" in token or "|>" in token for token in recipe.tokenizer._library.get_vocab() if token != END_OF_TEXT
    )


@pytest.mark.parametrize("piece", [16, 2**22])
def test_json_lines_are_read_by_their_text_field(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(texts, "PIECE_BYTES", piece)
    documents = ["Äpfel\nund Birnen", "", "more " * 30, "the last"]
    path = Path(json_lines(tmp_path / "a.jsonl", *documents))
    path.write_text(path.read_text() + "\n")
    expected = [document for document in documents if document]
    assert text_of(GPT2(data=str(path), tokenizer=MODEL)) == END_OF_TEXT.join(expected)
    for tokenizer in ("characters", "bytes"):
        assert text_of(GPT2(data=str(path), tokenizer=tokenizer)) == "\n".join(expected)
    raw = GPT2(data=str(path), json_field="none")
    assert text_of(raw) == path.read_text()
    body = GPT2(data=json_lines(tmp_path / "b.jsonl", *documents, field="body"), json_field="body")
    assert text_of(body) == "\n".join(expected) and GPT2(**body.options()).options() == body.options()


def test_folder_may_mix_json_lines_and_text(folder):
    json_lines(folder / "ab.jsonl", "one", "two")
    assert text_of(GPT2(data=str(folder), tokenizer=MODEL)) == END_OF_TEXT.join([FIRST, "one", "two", SECOND])
    assert text_of(GPT2(data=str(folder))) == "\n".join([FIRST, "one", "two", SECOND])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"text": "good"}\n{"text": ',
            r"a\.jsonl:2 is not JSON \(.*\); fix or remove this line, or give --json-field none",
        ),
        ('{"body": "x", "id": 1}\n', r"a\.jsonl:1 has no text in a field 'text' \(the line has body, id\); give"),
        ('{"text": 3}\n', r"a\.jsonl:1 has no text in a field 'text' \(it is 3\); give its field"),
        ("[1]\n", r"a\.jsonl:1 has no text in a field 'text' \(the line is no object\)"),
        ('{"text": "\\ud800"}\n', r"a\.jsonl:1 is not Unicode text \(surrogates not allowed\); fix or remove"),
    ],
)
def test_unreadable_json_line_is_named(tmp_path, content, words):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(InputError, match=words):
        GPT2(data=str(tmp_path / "a.jsonl")).data("train")
    assert not list((tmp_path / "cache" / "tokens").iterdir())


def test_held_out_part_follows_its_option(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 100)

    def lengths(**options):
        recipe = GPT2(data=str(tmp_path / "a.txt"), context=4, **options)
        assert GPT2(**recipe.options()).options() == recipe.options()
        return [len(recipe.data(split)._array) for split in ("train", "validation", "all")]

    assert lengths() == [900, 100, 1000] and lengths(held_out=0.25) == [750, 250, 1000]
    whole = GPT2(data=str(tmp_path / "a.txt"), held_out=0.0)
    assert len(whole.data("train")._array) == 1000
    with pytest.raises(InputError, match=r"nothing of .*a\.txt is held out \(held-out is 0\)"):
        whole.data("validation")


def test_short_text_has_no_held_out_part_unless_requested(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    with pytest.raises(NoSuchSplit, match=r"the validation part of .* has 10 tokens, fewer than one row of 10"):
        GPT2(data=str(tmp_path / "a.txt"), context=10).data("validation")
    with pytest.raises(InputError, match="has 20 tokens, fewer than one row") as found:
        GPT2(data=str(tmp_path / "a.txt"), context=20, held_out=0.2).data("validation")
    assert not isinstance(found.value, NoSuchSplit)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"held_out": 1.0}, r"held_out must be at least 0 and below 1, not 1\.0"),
        ({"separator": "space"}, "unknown separator 'space'; .*endoftext"),
        ({"separator": "endoftext"}, r"characters have no <\|endoftext\|>; use --tokenizer bpe or gpt2, or --sep"),
    ],
)
def test_impossible_option_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        GPT2(**options)


def test_large_sizes_need_gpt2s_tokenizer_only_for_text(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(FIRST * 100)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    recipe = GPT2(size="124m", data=str(tmp_path / "a.txt"))
    assert recipe.config.vocab == 50257
    words = r"^gpt2-124m reads text with GPT-2's tokenizer: .*HF_HUB_OFFLINE is set.*; or use --tokenizer bpe, which"
    with pytest.raises(InputError, match=words):
        recipe.data("train")
    assert GPT2(size="124m", data="fake", vocab=300).config.vocab == 300
    assert np.max(GPT2(size="124m", data=recipe._data, tokenizer="bytes").data("train").rows(0, 1)["tokens"]) < 256
