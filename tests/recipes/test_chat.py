"""Answers of a model to messages: where they end, what is left out of a full context, how often a program compiles."""

import jax
import numpy as np
import pytest

from tests.recipes.chats import QWEN, TEMPLATES, without_marks, write_model
from tpuswarm.errors import InputError
from tpuswarm.recipes.decoder import model, sample
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.language.chat.reply import reply
from tpuswarm.recipes.language.chat.template import turn_ends
from tpuswarm.recipes.language.sampling import make_sampling, text_of
from tpuswarm.train.recipe import Options

GREEDY = make_sampling(0.0)


def shown(*chunks, stops=(), ends=()):
    return list(text_of((list(chunk) for chunk in chunks), lambda t: bytes(t).decode(errors="replace"), ends, stops))


def test_text_is_shown_as_soon_as_it_is_certain():
    assert shown(b"ab", b"cd") == ["ab", "cd", ""]
    assert shown("ä".encode()[:1], "ä".encode()[1:] + b"b") == ["", "äb", ""]
    assert shown(b"abE", b"Nx", b"EN", b"DEND", stops=["END"]) == ["ab", "ENx", "", ""]
    assert shown(b"abE", stops=["END", "E!"]) == ["ab", "E"]
    assert shown(b"ab", b"c;d.", b"e", stops=[".", ";"]) == ["ab", "c"]
    assert shown(b"ab", b"c\0d", b"e", ends={0, None}) == ["ab", "c"]


class Recorded(Decoder):
    """Draws given tokens, and notes what stood before them."""

    def generate(self, params, start, count, sampling, seed):
        self.start, self.count = self.tokenizer.decode(start), count
        yield from self.answer


def recorded(place, answer=(), **options):
    recipe = Recorded(**Decoder.options_at(place), **options)
    recipe.answer = [recipe.tokenizer.encode(text).tolist() for text in answer]
    return recipe


def message(content, role="user"):
    return {"role": role, "content": content}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("marks", ["around", "and a line break", "none"])
def test_answer_ends_with_the_turn_or_the_text(tmp_path, name, marks):
    text, special = TEMPLATES[name]
    if marks == "and a line break":
        text = text.replace(f"{special[-1]}' }}}}", f"{special[-1]}\\n' }}}}")
    if marks == "none":
        text = without_marks(text)
    recipe = recorded(write_model(tmp_path / "published", name, text))
    assert recipe.tokenizer.decode([*turn_ends(recipe.chat_template, recipe.tokenizer)]) == special[-1]
    for end in (special[-1], recipe.tokenizer.end_text):
        recipe.answer = [recipe.tokenizer.encode(f"Hello {end} more").tolist()]
        assert "".join(reply(recipe, None, [message("Hi")], 50, GREEDY, 0)) == "Hello "
    assert recipe.start.startswith(special[0] * (name != "qwen")) and "Hi" in recipe.start and recipe.count == 50
    recipe.answer = [recipe.tokenizer.encode("one two").tolist()]
    assert "".join(reply(recipe, None, [message("Hi")], 50, GREEDY, 0, [" two"])) == "one"


def test_oldest_messages_leave_a_full_context(tmp_path):
    recipe = recorded(write_model(tmp_path / "published", template=QWEN), ["ok"], context=200)
    messages = [message("first"), message("one", "assistant"), message("second"), message("two", "assistant")]
    "".join(reply(recipe, None, [*messages, message("third")], 20, GREEDY, 0))
    assert "first" in recipe.start and "third" in recipe.start and recipe.count == 20
    "".join(reply(recipe, None, [*messages, message("x" * 100)], 20, GREEDY, 0))
    assert "first" not in recipe.start and "second" in recipe.start and "x" * 100 in recipe.start
    "".join(reply(recipe, None, [message("x" * 100)], 500, GREEDY, 0))
    assert recipe.count == 200 - len(recipe.tokenizer.encode(recipe.start)) > 20
    with pytest.raises(
        InputError, match=r"your message has \d+ tokens, and the context of 200 needs room for an answer"
    ):
        "".join(reply(recipe, None, [*messages, message("x" * 170)], 20, GREEDY, 0))


def test_model_without_a_template_cannot_chat(tmp_path):
    place = write_model(tmp_path / "published")
    (tmp_path / "published" / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="qwen3 has no chat template, so it cannot chat; use `tpuswarm sample`"):
        "".join(reply(recorded(place), None, [message("Hi")], 5, GREEDY, 0))


def test_lengths_of_a_bucket_share_their_programs(tmp_path):
    recipe = Decoder(**Decoder.options_at(write_model(tmp_path / "published")))
    params, before = model.init(jax.random.key(0), recipe.config), sample._fill._cache_size()

    def draw(length, count, sampling=GREEDY):
        chunks = list(sample.generate(params, [5] * length, count, sampling, 0, recipe.config, Options()))
        assert len(chunks) == -(-count // sample.CHUNK)
        return np.concatenate(chunks).tolist()

    whole = draw(3, 50)
    assert draw(3, 11) == whole[:11] and len(draw(30, 34)) == 34
    assert sample._fill._cache_size() - before == sample._prefill._cache_size() == 1
    draw(3, 62), draw(60, 60)
    assert sample._fill._cache_size() - before == 2
    draw(3, 5, make_sampling(0.5, top_k=3)), draw(3, 5, make_sampling(0.7, top_k=9))
    assert sample._fill._cache_size() - before == 3
    assert draw(3, 20, make_sampling(2.0, top_k=1)) == draw(3, 20, make_sampling(2.0, top_p=1e-6)) == whole[:20]
    fresh = draw(3, 50, make_sampling(0.0, repetition_penalty=1e6))
    assert len(set(fresh)) == 50 and 5 not in fresh
