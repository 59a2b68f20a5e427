"""Read conversations, and prompts with their completions, from rows of data, and mark the tokens whose loss counts."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.recipes.language.chat.template import ChatTemplate, Conversation, Message
from tpuswarm.recipes.language.text import COMPLETION, MESSAGES, PROMPT, ROWS, TOOLS, Advance, Text
from tpuswarm.recipes.language.tokenizer import Bpe

ROLES = ("system", "developer", "user", "assistant", "tool")
STARTS, COUNTED = np.uint32(1 << 31), np.uint32(1 << 30)
"""Bits of a stored token: it starts a conversation; its loss counts."""
TOKEN_BITS = np.uint32((1 << 30) - 1)
BATCH = 256
"""Conversations that the tokenizer encodes in parallel."""


class Completion(NamedTuple):
    """A plain text after a prompt, and where its line is."""

    prompt: str
    completion: str
    where: str


def read_conversations(text: Text, advance: Advance | None = None) -> Iterator[Conversation | Completion]:
    """Yield the conversations of rows; raise InputError for a row that is none."""
    for path in text.files:
        if not ROWS.search(path):
            raise InputError(
                f"{path} is not a .jsonl or .parquet file, so it holds no conversations; remove it, or use other --data"
            )
        with text.open_rows(path, advance) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse(line, f"{path}:{number}")


def _parse(line: bytes, where: str) -> Conversation | Completion:
    try:
        facts = json.loads(line, object_pairs_hook=_unique)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}); fix or remove this line") from error
    if not isinstance(facts, dict):
        raise InputError(f"{where} is not an object with {MESSAGES}, or with a {PROMPT} and a {COMPLETION}")
    if COMPLETION in facts or (PROMPT in facts and MESSAGES not in facts):
        return _parse_completion(facts, where)
    messages: Any = facts.get(MESSAGES)
    check_messages(messages, f"list of {MESSAGES}", where)
    if not _has_answer(messages):
        raise InputError(f"{where} has no assistant turn to learn from; remove the line")
    return Conversation(messages, _parse_tools(facts.get(TOOLS), where), where)


def _parse_completion(facts: dict[str, Any], where: str) -> Conversation | Completion:
    if MESSAGES in facts:
        raise InputError(f"{where} has {MESSAGES} and a {COMPLETION}; keep one of them")
    prompt, completion = facts.get(PROMPT), facts.get(COMPLETION)
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise InputError(f"{where} has an empty {COMPLETION}; remove the line")
        try:
            f"{prompt}{completion}".encode()
        except UnicodeEncodeError as error:  # JSON can contain half of a UTF-16 pair
            raise InputError(f"{where} is not Unicode text ({error.reason}); fix or remove this line") from error
        return Completion(prompt, completion, where)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise InputError(f"{where} needs a {PROMPT} and a {COMPLETION}, both texts or both lists of messages")
    check_messages(prompt, f"list of messages as its {PROMPT}", where)
    check_messages(completion, f"list of messages as its {COMPLETION}", where)
    if not _has_answer(completion):
        raise InputError(f"{where} has no assistant turn in its {COMPLETION}; remove the line")
    return Conversation(prompt + completion, _parse_tools(facts.get(TOOLS), where), where, len(prompt))


def _parse_tools(tools: Any, where: str) -> list[Any] | None:
    """Return a list of tools, which a table may hold as JSON because their fields differ."""
    try:
        found = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        found = tools
    if found is not None and not isinstance(found, list):
        raise InputError(f"{where} has {TOOLS} that are neither a list nor a list as JSON")
    return found


def check_messages(messages: Any, what: str, where: str) -> None:
    """Raise InputError unless these are messages with known roles and texts."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InputError(f"{where} has no {what}, each with a role and a content")
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InputError(f"{where} has the role {role!r}, which is unknown; {did_you_mean(str(role), ROLES)}")
        has_calls = role == "assistant" and bool(message.get("tool_calls"))
        if not isinstance(content, str) and not has_calls:
            raise InputError(f"{where} has a {role} message whose content is not text")
        if role == "assistant" and not has_calls and not content.strip():
            raise InputError(f"{where} has an empty assistant turn; remove the turn or the line")


def _has_answer(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    facts = dict(pairs)
    if len(facts) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return facts


def encode_conversations(
    text: Text, template: ChatTemplate | None, tokenizer: Bpe, advance: Advance | None = None
) -> Iterator[np.ndarray]:
    """Yield the tokens of conversations, uint32, with the bits STARTS and COUNTED."""
    conversations = read_conversations(text, advance)
    while batch := list(islice(conversations, BATCH)):
        rendered = [_render(conversation, template, tokenizer) for conversation in batch]
        encodings = tokenizer.encode_with_offsets([text for text, _ in rendered])
        for (_, spans), (numbers, offsets_Nx2) in zip(rendered, encodings, strict=True):
            for start, end in spans:
                numbers[(offsets_Nx2[:, 0] < end) & (offsets_Nx2[:, 1] > start)] |= COUNTED
            numbers[:1] = numbers[:1] & TOKEN_BITS | STARTS
            yield numbers


def _render(
    conversation: Conversation | Completion, template: ChatTemplate | None, tokenizer: Bpe
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and where it counts."""
    if isinstance(conversation, Completion):
        before = tokenizer.begin_text + conversation.prompt
        end = _end_token(template, tokenizer, conversation.where)
        text = before + conversation.completion.removesuffix(end) + end
        return text, [(len(before), len(text))]
    if template is None:
        raise InputError(
            f"{conversation.where} is a conversation, and the tokenizer has no chat template: put its "
            "chat_template.jinja beside its tokenizer.json and use hf:DIR"
        )
    return template.spans(conversation, tokenizer.special_tokens)


def _end_token(template: ChatTemplate | None, tokenizer: Bpe, where: str) -> str:
    """Return what ends a completion: the `eos_token` that came with the chat template, or the end of text."""
    end = (template.tokens.get("eos_token", "") if template else "") or tokenizer.end_text
    if not end or not tokenizer.special_tokens.fullmatch(end):
        raise InputError(f"{where} has a {COMPLETION}, and the tokenizer has no token for its end; use another one")
    return end
