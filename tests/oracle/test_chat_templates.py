"""Rendered conversations beside transformers: token numbers, and the assistant's tokens."""

import json

import numpy as np
import pytest
from tests.recipes.chats import CHATS, TEMPLATES, messages, without_marks, write_chats, write_tokenizer

from tpuswarm.recipes.language.chat import COUNTED, STARTS, TOKEN_BITS, encode_conversations, read_template
from tpuswarm.recipes.language.hub import Published
from tpuswarm.recipes.language.text import open_text
from tpuswarm.recipes.language.tokenizer import read_bpe

transformers = pytest.importorskip("transformers")

THINKING = [
    ("user", "1+1"),
    ("assistant", "<think>\nhm\n</think>\n\n2"),
    ("user", "+1"),
    ("assistant", "<think>\nso\n</think>\n\n3"),
]


def ours(folder, data):
    place = Published("theirs", folder)
    return list(
        encode_conversations(open_text(data, "messages"), read_template(place), read_bpe(folder / "tokenizer.json"))
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("where", ["marks", "prompts", "a file"])
def test_tokens_and_masks_are_those_of_transformers(tmp_path, name, where):
    text, _ = TEMPLATES[name]
    write_tokenizer(tmp_path / "theirs", name)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    write_tokenizer(
        tmp_path / "ours", name, {"marks": text, "prompts": without_marks(text), "a file": "of no use"}[where]
    )
    if where == "a file":
        (tmp_path / "ours" / "chat_template.jinja").write_text(text)
    chats = [*CHATS, *[THINKING] * (name == "qwen")]
    found = ours(tmp_path / "ours", write_chats(tmp_path / "chat.jsonl", *chats))
    assert len(found) == len(chats)
    for chat, tokens in zip(chats, found, strict=True):
        wanted = theirs.apply_chat_template(
            messages(chat), return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        assert (tokens & TOKEN_BITS).tolist() == wanted["input_ids"]
        assert (tokens & COUNTED != 0).astype(int).tolist() == wanted["assistant_masks"]
        assert np.flatnonzero(tokens & STARTS).tolist() == [0]


@pytest.mark.parametrize("marked", [True, False])
def test_tools_and_their_calls_are_rendered_as_in_transformers(tmp_path, marked):
    text, _ = TEMPLATES["qwen"]
    write_tokenizer(tmp_path / "theirs", "qwen")
    write_tokenizer(tmp_path / "ours", "qwen", text if marked else without_marks(text))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    tools = [{"type": "function", "function": {"name": "time", "description": "größer <b>"}}]
    chat = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "time", "arguments": {"zone": "UTC"}}]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "At 12:00"},
    ]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat, "tools": tools}))
    (tokens,) = ours(tmp_path / "ours", str(tmp_path / "chat.jsonl"))
    wanted = theirs.apply_chat_template(chat, tools=tools, return_assistant_tokens_mask=True, return_dict=True)
    assert (tokens & TOKEN_BITS).tolist() == wanted["input_ids"]
    assert (tokens & COUNTED != 0).astype(int).tolist() == wanted["assistant_masks"]
