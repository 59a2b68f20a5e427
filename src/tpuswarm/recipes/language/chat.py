"""Conversations as training data: read JSON lines, render them by a model's chat template, mark the assistant's tokens.

Templates are Jinja, as in transformers, and run in Jinja's sandbox.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, first_line
from tpuswarm.recipes.language.hub import Published
from tpuswarm.recipes.language.text import JSON_LINES, MESSAGES, Advance, Text
from tpuswarm.recipes.language.tokenizer import TOKENIZER_CONFIG_FILE, Bpe

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_FILE = "chat_template.jinja"
STARTS, COUNTED = np.uint32(1 << 31), np.uint32(1 << 30)
"""Bits of a stored token: it starts a conversation; its loss counts."""
TOKEN_BITS = np.uint32((1 << 30) - 1)
BATCH = 256
"""Conversations that the tokenizer encodes in parallel."""
MARKS = "\ufdd0", "\ufdd1"
"""Stand around `{% generation %}` in a rendered text; Unicode reserves them for use inside programs."""
FIXED_DATE = datetime(2024, 7, 26)
"""Today for templates that ask, so that data has the same tokens every day. Llama's templates default to it, too."""

Message = Mapping[str, Any]


class Conversation(NamedTuple):
    """The messages of one JSON line, the tools that they may use, and where the line is."""

    messages: Sequence[Message]
    tools: Any
    where: str


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, in templates around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012  # as in Jinja's own

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in MARKS)
        return [begin, *body, end]


class _SafeNamespace(Namespace):
    """Refuses names with an underscore, by which templates have left the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):
            _refuse_private(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template cannot store {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    return dict(*pairs, **values)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template that renders messages, and the special tokens that it may name.

    date: today for its `strftime_now`.
    """

    text: str
    tokens: Mapping[str, str]
    name: str
    date: datetime = FIXED_DATE

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals = {
            "range": environment.globals["range"], "dict": _dict, "namespace": _SafeNamespace,
            "raise_exception": _raise_exception, "strftime_now": self.date.strftime,
        }  # fmt: skip
        try:
            return environment.from_string(self.text)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template of {self.name} is not valid Jinja: {first_line(error)}") from error

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of a tokenizer_config.json that hold it."""
        return {"chat_template": self.text, **self.tokens}

    def render(self, conversation: Conversation, *, adds_prompt: bool = False) -> str:
        """Return the text of a conversation, with MARKS in it; adds_prompt: up to where the assistant begins to speak.

        Raise InputError if the template refuses it.
        """
        messages, tools, where = conversation
        try:
            text = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=adds_prompt, **self.tokens
            )
            text.encode()  # JSON can contain half of a UTF-16 pair
            return text
        except Exception as error:  # of Jinja, or of an operation in the template
            raise InputError(f"{where}: the chat template of {self.name} refuses it ({first_line(error)})") from error

    def spans(self, conversation: Conversation, ends: re.Pattern[str]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where the assistant speaks in it.

        Without `{% generation %}` a turn begins behind its prompt and ends with a special token. ends: matches
        special tokens.
        """
        parts = re.split(f"([{''.join(MARKS)}])", self.render(conversation))
        text, spans = "".join(parts[::2]), list[tuple[int, int]]()
        if len(parts) > 1:
            borders = np.cumsum([len(part) for part in parts[::2]]).tolist()
            return text, list(zip(borders[:-1:2], borders[1::2], strict=False))
        messages = conversation.messages
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(conversation._replace(messages=messages[:index]), adds_prompt=True)
            if not text.startswith(prompt):
                raise InputError(
                    f"{conversation.where}: the chat template of {self.name} changes earlier turns when another "
                    "follows, so the assistant's tokens cannot be found; put {% generation %} around them in it"
                )
            content = str(message.get("content") or "").strip()
            at = text.find(content, len(prompt)) if content else -1
            end = at + len(content)
            found = ends.search(text, len(prompt)) if at < 0 else re.compile(rf"\s*{ends.pattern}").match(text, end)
            spans.append((len(prompt), found.end() if found else max(end, len(prompt))))
        return text, spans


def read_template(place: Published) -> ChatTemplate | None:
    """Read a model's chat template; None if it has none."""
    config, file = place.find(TOKENIZER_CONFIG_FILE), place.find(TEMPLATE_FILE)
    try:
        facts = json.loads(config.read_text(encoding="utf-8")) if config else {}
        text = file.read_text(encoding="utf-8") if file else facts.get("chat_template")
        if isinstance(text, list):  # several by name
            text = next((each["template"] for each in text if each["name"] == "default"), None)
        found = {name: value.get("content") if isinstance(value, dict) else value for name, value in facts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the {TOKENIZER_CONFIG_FILE} of {place.name} cannot be read: {first_line(error)}") from error
    tokens = {name: token for name, token in found.items() if name.endswith("_token") and isinstance(token, str)}
    return ChatTemplate(text, tokens, place.name) if isinstance(text, str) else None


def turn_ends(template: ChatTemplate, tokenizer: Bpe) -> set[int]:
    """Return the special tokens that the template puts behind what the assistant says."""
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    text, spans = template.spans(Conversation(messages, None, "a test"), tokenizer.special_tokens)
    ends = tokenizer.special_tokens.findall(text, text.rfind("answer"), spans[-1][1])
    return {int(number) for end in ends for number in tokenizer.encode(end)}


def read_conversations(text: Text, advance: Advance | None = None) -> Iterator[Conversation]:
    """Yield the conversations of JSON lines; raise InputError for a line that is none."""
    for path in text.files:
        if not JSON_LINES.search(path):
            raise InputError(f"{path} is no .jsonl file, so it holds no conversations; remove it, or use other --data")
        with text.open(path, advance) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _conversation(line, f"{path}:{number}")


def _conversation(line: bytes, where: str) -> Conversation:
    try:
        facts = json.loads(line, object_pairs_hook=_unique)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}); fix or remove this line") from error
    messages = facts.get(MESSAGES) if isinstance(facts, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InputError(f"{where} has no list of {MESSAGES}, each with a role and a content")
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InputError(f"{where} has the role {role!r}, which is unknown; {did_you_mean(str(role), ROLES)}")
        has_calls = role == "assistant" and bool(message.get("tool_calls"))
        if not isinstance(content, str) and not has_calls:
            raise InputError(f"{where} has a message of the {role} whose content is no text")
        if role == "assistant" and not has_calls and not content.strip():
            raise InputError(f"{where} has an empty turn of the assistant; remove the turn or the line")
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{where} has no turn of the assistant, so nothing to learn; remove the line")
    return Conversation(messages, facts.get("tools"), where)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    facts = dict(pairs)
    if len(facts) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return facts


def encode_conversations(
    text: Text, template: ChatTemplate, tokenizer: Bpe, advance: Advance | None = None
) -> Iterator[np.ndarray]:
    """Yield the tokens of conversations, uint32, with the bits STARTS and COUNTED."""
    ends = tokenizer.special_tokens
    conversations = read_conversations(text, advance)
    while batch := list(islice(conversations, BATCH)):
        rendered = [template.spans(conversation, ends) for conversation in batch]
        encodings = tokenizer.encode_with_offsets([text for text, _ in rendered])
        for (_, spans), (numbers, offsets_Nx2) in zip(rendered, encodings, strict=True):
            for start, end in spans:
                numbers[(offsets_Nx2[:, 0] < end) & (offsets_Nx2[:, 1] > start)] |= COUNTED
            numbers[:1] = numbers[:1] & TOKEN_BITS | STARTS
            yield numbers
