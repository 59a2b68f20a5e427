"""Conversations as training data: packed rows, a loss of the assistant's tokens alone, and bad input."""

import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.recipes.chats import CHATS, QWEN, messages, without_marks, write_chats, write_model
from tpuswarm.errors import InputError, NoSuchSplit
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.language.chat.conversations import COUNTED, STARTS, TOKEN_BITS
from tpuswarm.recipes.language.chat.rows import ChatSource, split_conversations
from tpuswarm.recipes.language.chat.template import ChatTemplate, Conversation
from tpuswarm.train.program.compiled import place_program
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Clock, Options
from tpuswarm.train.run.directory import read_config
from tpuswarm.train.run.loaded import load_run
from tpuswarm.train.run.trust import rebuild_recipe
from tpuswarm.train.trainer import Trainer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def place(tmp_path):
    return write_model(tmp_path / "published", template=without_marks(QWEN))


def decoder(place, data, **options):
    return Decoder(**Decoder.options_at(place) | {"data": str(data), "context": 64} | options)


def stored(*lengths):
    """Conversations of so many tokens, numbered with a gap between them; the last half of each counts."""
    found, first = [], 1
    for length in lengths:
        tokens = np.arange(first, first + length, dtype=np.uint32)
        tokens[-(-length // 2) :] |= COUNTED
        tokens[0] |= STARTS
        found, first = [*found, tokens], first + length + 1
    return np.concatenate(found)


def test_every_conversation_is_once_in_an_epoch_and_rows_are_full():
    lengths = [5, 3, 9, 2, 2, 7, 4]
    array = stored(*lengths)
    source = ChatSource(array, 8, 0, "digest", "data")
    assert source.rows_per_epoch == 4 and (source.conversations, source.cut, source.left_out) == (7, 0, 0)
    for epoch in (0, 1):
        rows = source.rows(4 * epoch, 4)
        assert sorted(rows["tokens"][rows["tokens"] > 0]) == (array & TOKEN_BITS).tolist()
        halves = rows["tokens"][:, 1:][rows["counted"]]
        assert len(halves) == sum(length // 2 for length in lengths)
    first, second = (source.rows(start, 4)["tokens"].tolist() for start in (0, 4))
    assert first != second and sorted(first) == sorted(second)
    np.testing.assert_array_equal(source.rows(2, 5)["segments"], source.rows(0, 7)["segments"][2:])
    for tokens, segments, counted in zip(*source.rows(0, 4).values(), strict=True):
        inputs = tokens[:-1]
        starts = (
            np.flatnonzero((np.diff(inputs) != 1) & (inputs[:-1] > 0)) + 1
        )  # of another conversation, or of padding
        assert set(np.flatnonzero(np.diff(segments)) + 1) == set(starts)
        assert not counted[starts - 1].any() and not counted[tokens[1:] == 0].any()


def test_long_conversation_is_cut_and_one_without_an_answer_in_its_row_is_left_out():
    source = ChatSource(stored(12, 30, 4), 9, 0, "digest", "data")
    assert (source.conversations, source.cut, source.left_out, source.rows_per_epoch) == (2, 1, 1, 2)
    with pytest.raises(InputError, match="data has no conversation with an answer within 9 tokens"):
        ChatSource(stored(30), 9, 0, "digest", "data")


def test_last_conversations_are_held_out():
    array = stored(3, 4, 5, 6)
    parts = [split_conversations(array, split, 0.3) for split in ("train", "validation", "all")]
    assert [len(part) for part in parts] == [12, 6, 18]
    assert len(split_conversations(array, "validation", 0.1)) == 0


def loss_of(program, state, batch):
    found = program.evaluate(state, batch)["loss"]
    return float(found.sum), float(found.weight)


def test_tokens_do_not_depend_on_the_other_conversations_of_their_row(place, tmp_path):
    recipe = decoder(place, write_chats(tmp_path / "a.jsonl", *CHATS), context=256, held_out=0.0)
    program = recipe.program(Options(precision="highest"))
    state = program.init(jax.random.key(1))
    batch = recipe.data("all").rows(0, 1)
    assert recipe.data("all").rows_per_epoch == 1 and batch["segments"].max() == len(CHATS)
    alone = [
        loss_of(
            program,
            state,
            decoder(place, write_chats(tmp_path / f"{n}.jsonl", chat), context=256).data("all").rows(0, 1),
        )
        for n, chat in enumerate(CHATS)
    ]
    total, weight = loss_of(program, state, batch)
    assert weight == sum(weight for _, weight in alone) == batch["counted"].sum()
    assert total == pytest.approx(sum(total for total, _ in alone), rel=1e-5)

    def embedding_gradient(counted):
        counted = batch["counted"] & counted
        grads = program.batch_gradient(state, batch | {"counted": counted}, jax.random.key(0))
        return np.abs(np.asarray(grads["embed"])).max(-1)

    batch["tokens"] = np.arange(257, dtype=np.int32)[None]  # each position has a token of its own
    own = batch["segments"][0] == 2
    is_reached = embedding_gradient(own)[:256] > 0
    assert is_reached[own][0] and not is_reached[~own].any()


def test_loss_and_update_are_the_same_over_any_split_of_a_batch(place, tmp_path, devices):
    """Micro-batches and devices count different numbers of tokens."""
    recipe = decoder(place, write_chats(tmp_path / "a.jsonl", *CHATS * 4), held_out=0.0)
    found = []
    for accumulate, count in [(1, 1), (4, 1), (2, 2), (1, 4)]:
        placed = place_program(recipe, Request(8, precision="highest", accumulate=accumulate), devices[:count])
        rows = recipe.data("train").rows(0, 8)
        assert len(set(rows["counted"].sum(-1).tolist())) > 1
        with jax.sharding.set_mesh(placed.mesh) if isinstance(placed.mesh, Mesh) else placed.mesh:
            program = recipe.program(Options(precision="highest", accumulate=accumulate, clip=1.0))
            clock = Clock(jax.random.key(0), np.int32(0), np.float32(0.5))
            state, metrics = jax.jit(program.step)(program.init(jax.random.key(1)), rows, clock)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"]), np.asarray(state.params["embed"])))
    for loss, norm, embed in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5) and norm == pytest.approx(found[0][1], rel=1e-5)
        np.testing.assert_allclose(embed, found[0][2], atol=1e-6)


def test_run_on_conversations_goes_on_without_the_published_model(place, tmp_path, capsys):
    data = write_chats(tmp_path / "a.jsonl", *CHATS * 10)
    run = tmp_path / "run"
    Trainer(devices=1).fit(decoder(place, data), steps=2, batch=2, run=run, init_from=place)
    assert "\\n<|im_start|>assistant\\n[[<think>\\n\\n</think>\\n\\nHello, you!<|im_end|>]]" in capsys.readouterr().err
    (tmp_path / "published").rename(tmp_path / "gone")
    recipe = rebuild_recipe(run)
    assert read_config(run)["recipe"]["options"]["json_field"] == "messages"
    assert recipe.chat_template.text == without_marks(QWEN)
    whole = decoder(f"hf:{tmp_path / 'gone'}", data)
    for name, array in whole.data("train").rows(0, 30).items():
        np.testing.assert_array_equal(array, recipe.data("train").rows(0, 30)[name])
    shared = tmp_path / "shared"
    member = Decoder(**recipe.options() | recipe.share(shared))
    np.testing.assert_array_equal(member.data("train").rows(0, 9)["counted"], whole.data("train").rows(0, 9)["counted"])
    out = tmp_path / "out"
    out.mkdir()
    recipe.export(load_run(run, jax.devices()[:1]).state, out)
    facts = json.loads((out / "tokenizer_config.json").read_text())
    assert facts["chat_template"] == without_marks(QWEN) and facts["eos_token"] == "<|im_start|>"
    again = decoder(f"hf:{out}", data)
    np.testing.assert_array_equal(again.data("train").rows(0, 9)["tokens"], whole.data("train").rows(0, 9)["tokens"])


def test_folder_of_files_and_what_is_said_about_it(place, tmp_path):
    (tmp_path / "data").mkdir()
    write_chats(tmp_path / "data" / "a.jsonl", *CHATS)
    write_chats(tmp_path / "data" / "b.jsonl", *CHATS * 4, [("user", "x" * 99), ("assistant", "y")])
    recipe = decoder(place, tmp_path / "data", context=40, held_out=0.2)
    assert recipe.describe()["data"] == (
        "13 conversations in 13 rows to train on (8 are longer than the context of 40 and end there; 4 more are left "
        "out, because their answers begin after it), 2 held out"
    )
    with pytest.raises(NoSuchSplit):
        decoder(place, write_chats(tmp_path / "one.jsonl", *CHATS)).data("validation")
    (tmp_path / "data" / "c.txt").write_text("plain")
    with pytest.raises(InputError, match=r"c\.txt is not a \.jsonl or \.parquet file, so it holds no conversations"):
        decoder(place, tmp_path / "data").data("train")


def line(*chat, **facts):
    return json.dumps({"messages": messages(chat), **facts})


def pair(prompt=None, completion=None):
    facts = {"prompt": prompt, "completion": completion}
    return json.dumps({name: value for name, value in facts.items() if value is not None})


GOOD = line(("user", "Hi"), ("assistant", "Hello"))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"text": "x"}', r"a\.jsonl:2 has no list of messages, each with a role and a content"),
        ('{"messages": ["x"]}', r"a\.jsonl:2 has no list of messages"),
        ("[1]", r"a\.jsonl:2 is not an object with messages, or with a prompt and a completion"),
        ('{"messages": ', r"a\.jsonl:2 is not JSON"),
        ('{"messages": [], "messages": []}', r"a\.jsonl:2 is not JSON \(it has 'messages' twice\); fix or remove this"),
        (GOOD.replace('"Hi"', '"Hi", "role": "user"'), r"a\.jsonl:2 is not JSON \(it has 'role' twice\)"),
        (line(("user", "Hi"), ("asistant", "x")), r"has the role 'asistant', which is unknown; did you mean assistant"),
        (line(("user", "Hi"), ("assistant", " \n")), r"a\.jsonl:2 has an empty assistant turn; remove the turn"),
        (line(("user", "Hi")), r"a\.jsonl:2 has no assistant turn to learn from"),
        (line(("user", 3), ("assistant", "x")), r"a\.jsonl:2 has a user message whose content is not text"),
        (
            GOOD.replace("Hello", "\\ud800"),
            r"a\.jsonl:2: the chat template of .* refuses it \(.*surrogates not allowed",
        ),
        (line(("assistant", "x")), r"a\.jsonl:2: the chat template of hf:.* refuses it \(Begin with the user\)"),
        (
            line(("user", "a"), ("assistant", "b"), tools="time"),
            r"a\.jsonl:2 has tools that are neither a list nor a list as JSON",
        ),
        (
            line(("user", "a"), ("assistant", "b"), tools={"name": "time"}),
            r"a\.jsonl:2 has tools that are neither a list nor a list as JSON",
        ),
        (pair("a"), r"a\.jsonl:2 needs a prompt and a completion, both texts or both lists of messages"),
        (pair(completion="a"), r"a\.jsonl:2 needs a prompt and a completion"),
        (pair("a", messages([("assistant", "b")])), r"a\.jsonl:2 needs a prompt and a completion, both texts or both"),
        (pair("a", " \n"), r"a\.jsonl:2 has an empty completion; remove the line"),
        (pair("a", "\ud800"), r"a\.jsonl:2 is not Unicode text \(surrogates not allowed\); fix or remove this line"),
        (
            line(("user", "a"), ("assistant", "b"), prompt="a", completion="b"),
            r"a\.jsonl:2 has messages and a completion; keep one of them",
        ),
        (
            pair(messages([("user", "a")]), messages([("user", "b")])),
            r"a\.jsonl:2 has no assistant turn in its completion; remove the line",
        ),
        (pair(messages([("user", "a")]), [1]), r"a\.jsonl:2 has no list of messages as its completion, each with a"),
        (pair(messages([("user", "a")]), messages([("assistant", "")])), r"a\.jsonl:2 has an empty assistant turn"),
    ],
)
def test_unreadable_conversation_is_named(tmp_path, bad, words):
    refusal = (
        "{%- if messages and messages[0].role == 'assistant' %}{{ raise_exception('Begin with the user') }}{% endif %}"
    )
    place = write_model(tmp_path / "published", template=refusal + QWEN)
    (tmp_path / "a.jsonl").write_text(f"{GOOD}\n{bad}\n")
    with pytest.raises(InputError, match=words):
        decoder(place, tmp_path / "a.jsonl").data("train")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("", r"a\.jsonl:1 is a conversation, and the tokenizer has no chat template: put its chat_template\.jinja"),
        ("{% if %}", "the chat template of hf:.* is not valid Jinja: "),
        ("{{ messages | length }}", "changes earlier turns when another follows, so the assistant's tokens cannot be"),
        ("{{ ''.__class__.__mro__ }}", "refuses it .access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "refuses it .access to attribute 'append'|refuses it .*unsafe"),
        ("{% set x = namespace(__y=1) %}", "refuses it .a template cannot store '__y'"),
        ("{{ cycler.__init__.__globals__ }}", "refuses it .*'Undefined' object is unsafe"),
    ],
)
def test_template_that_cannot_be_used_is_refused(tmp_path, template, words):
    place = write_model(tmp_path / "published", template=template)
    if not template:
        (tmp_path / "published" / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=words):
        decoder(place, write_chats(tmp_path / "a.jsonl", *CHATS)).data("train")


def decoded_segments(recipe):
    """The whole text and the counted text of each conversation, by its beginning."""
    source = recipe.data("all")
    found = []
    for tokens, segments, counted in zip(*source.rows(0, source.rows_per_epoch).values(), strict=True):
        for segment in range(1, segments.max() + 1):
            first, *_, last = np.flatnonzero(segments == segment)
            whole, learnt = tokens[first : last + 1], tokens[first + 1 : last + 2][counted[first : last + 1]]
            found.append(tuple(recipe.tokenizer.decode(part.tolist()) for part in (whole, learnt)))
    return sorted(found)


def test_whole_turn_counts_if_thoughts_hold_the_answer_and_if_calls_follow_it(place, tmp_path):
    thoughtful = [("user", "6 * 7?"), ("assistant", "<think>\n42 is 6 * 7\n</think>\n\n42")]
    calls = [{"name": "time", "arguments": {}}]
    calling = [*messages([("user", "When?")]), {"role": "assistant", "content": "Wait", "tool_calls": calls}]
    data = tmp_path / "a.jsonl"
    write_chats(data, thoughtful, [("user", "Hi"), ("assistant", "hi")])
    data.write_text(data.read_text() + json.dumps({"messages": calling}) + "\n")
    learnt = {learnt for _, learnt in decoded_segments(decoder(place, data, context=256, held_out=0.0))}
    assert learnt == {
        "<think>\n42 is 6 * 7\n</think>\n\n42<|im_end|>",
        "<think>\n\n</think>\n\nhi<|im_end|>",
        f"<think>\n\n</think>\n\nWait<tool_call>{json.dumps(calls[0])}</tool_call><|im_end|>",
    }


def test_calls_that_begin_with_a_special_token_count_to_their_end():
    template = (
        "{% for message in messages %}{% if message.tool_calls %}[CALLS]{{ message.tool_calls | tojson }}</s>"
        "{% else %}[{{ message.role }}]{{ message.content }}</s>{% endif %}{% endfor %}"
    )
    call = {"role": "assistant", "tool_calls": [1]}
    chat = [{"role": "user", "content": "?"}, call, {"role": "tool", "content": "7"}]
    ends = re.compile(r"(?:\[CALLS\]|</s>)")
    text, spans = ChatTemplate(template, {}, "t").spans(Conversation(chat, None, "here"), ends)
    assert [text[start:end] for start, end in spans] == ["[CALLS][1]</s>"]


def test_only_completions_count_whatever_form_a_line_has(place, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    chat = messages([("system", "S"), ("user", "Hi"), ("assistant", "Hello"), ("user", "?")])
    (data / "a.jsonl").write_text(f"{pair('2+2=', '4')}\n{pair('', 'All of it<|im_start|>')}\n")
    (data / "b.jsonl").write_text(f"{pair(chat, messages([('assistant', 'Yes')]))}\n")
    both = json.dumps({"prompt": "Hi", "messages": messages([("user", "Hi"), ("assistant", "Oh")])})
    (data / "c.jsonl").write_text(f"{both}\n")
    recipe = decoder(place, data, context=256, held_out=0.0)
    assert recipe.data("all").rows_per_epoch == 1
    start, end, thought = "<|im_start|>", "<|im_end|>\n", "<think>\n\n</think>\n\n"
    dialogue = f"{start}system\nS{end}{start}user\nHi{end}{start}assistant\nHello{end}{start}user\n?{end}"
    found = decoded_segments(recipe)
    assert [whole for whole, _ in found] == sorted([
        "2+2=4<|im_start|>",  # the eos_token of the tokenizer_config.json
        "All of it<|im_start|>",
        f"{dialogue}{start}assistant\n{thought}Yes{end}",
        f"{start}user\nHi{end}{start}assistant\n{thought}Oh{end}",
    ])  # fmt: skip
    assert [learnt for _, learnt in found] == [
        "4<|im_start|>", f"{thought}Yes{end}", f"{thought}Oh<|im_end|>", "ll of it<|im_start|>"
    ]  # fmt: skip


def test_completions_need_a_published_tokenizer_with_an_end_but_no_chat_template(place, tmp_path):
    config = tmp_path / "published" / "tokenizer_config.json"
    (tmp_path / "a.jsonl").write_text(f"{pair('2+2=', '4')}\n")
    config.unlink()
    assert decoded_segments(decoder(place, tmp_path / "a.jsonl"))[0][0].startswith("2+2=4<|endoftext|>")
    with pytest.raises(InputError, match=r"a\.jsonl holds conversations, which need a published tokenizer: use --to"):
        Decoder(size="tiny", data=str(tmp_path / "a.jsonl")).describe()
    file = tmp_path / "published" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(InputError, match=r"a\.jsonl:1 has a completion, and the tokenizer has no token for its end"):
        decoder(place, tmp_path / "a.jsonl").data("train")


def test_prompt_that_its_template_changes_is_refused(tmp_path):
    place = write_model(tmp_path / "published", template="{{ messages | length }}{{ messages[-1].content }}")
    (tmp_path / "a.jsonl").write_text(pair(messages([("user", "a")]), messages([("assistant", "b")])))
    with pytest.raises(InputError, match="changes the prompt when a completion follows, so the completion cannot be f"):
        decoder(place, tmp_path / "a.jsonl").data("train")


def test_first_conversation_is_shown_before_and_at_the_start_of_a_run(place, tmp_path):
    data = write_chats(tmp_path / "a.jsonl", *CHATS * 2)
    shown = [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>\n\n</think>\n\nHello, you!<|im_end|>", True),
        ("\n", False),
    ]
    assert decoder(place, data).preview(quick=True) == [shown] and not (tmp_path / "cache").exists()
    assert decoder(place, data).preview() == [shown]
    assert decoder(place, data, context=2).preview() == [[("<|im_start|>us", False)]]
    (tmp_path / "blank.jsonl").write_text("\n")
    assert decoder(place, tmp_path / "blank.jsonl", json_field="messages").preview(quick=True) == []
    (tmp_path / "a.txt").write_text("plain text")
    assert decoder(place, tmp_path / "a.txt").preview() == []
