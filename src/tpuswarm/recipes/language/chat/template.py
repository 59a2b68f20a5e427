"""Render conversations by a model's chat template, and find what the assistant says.

Templates are Jinja, as in transformers, and run in Jinja's sandbox.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tpuswarm.errors import InputError, first_line
from tpuswarm.recipes.language.hub import Published
from tpuswarm.recipes.language.tokenizer import TOKENIZER_CONFIG_FILE, Bpe

TEMPLATE_FILE = "chat_template.jinja"
MARKS = "\ufdd0", "\ufdd1"
"""Stand around `{% generation %}` in a rendered text; Unicode reserves them for use inside programs."""
MARK = re.compile(f"[{''.join(MARKS)}]")
FIXED_DATE = datetime(2024, 7, 26)
"""Today for templates that ask, so that data has the same tokens every day. Llama's templates default to it, too."""

Message = Mapping[str, Any]


class Conversation(NamedTuple):
    """The messages of one JSON line, the tools that they may use, and where the line is.

    prompt: how many messages are a prompt, if the others are its completion.
    """

    messages: Sequence[Message]
    tools: Any
    where: str
    prompt: int | None = None


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
        messages, tools, where, _ = conversation
        try:
            text = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=adds_prompt, **self.tokens
            )
            text.encode()  # JSON can contain half of a UTF-16 pair
            return text
        except Exception as error:  # of Jinja, or of an operation in the template
            raise InputError(f"{where}: the chat template of {self.name} refuses it ({first_line(error)})") from error

    def spans(self, conversation: Conversation, ends: re.Pattern[str]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where its completion is or the assistant speaks.

        Without `{% generation %}` a turn begins behind its prompt and ends with a special token. ends: matches
        special tokens.
        """
        parts = MARK.split(self.render(conversation))
        text, spans = "".join(parts), list[tuple[int, int]]()
        if conversation.prompt is not None:
            return text, [(self._find_start(conversation, conversation.prompt, text), len(text))]
        if len(parts) > 1:
            borders = np.cumsum([len(part) for part in parts]).tolist()
            return text, list(zip(borders[:-1:2], borders[1::2], strict=False))
        for index, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            start = self._find_start(conversation, index, text)
            if message.get("tool_calls"):  # special tokens may stand inside them
                turns = conversation._replace(messages=conversation.messages[: index + 1])
                until = MARK.sub("", self.render(turns))
                if text.startswith(until):
                    spans.append((start, max(start, len(until.rstrip()))))
                    continue
            content = str(message.get("content") or "").strip()
            at = text.find(content, start)
            end = start if at < 0 else at + len(content)
            found = ends.search(text, end)
            # Thoughts before the content may contain its text, and calls may follow it.
            is_end = at < 0 or message.get("tool_calls") or (found and text[: found.start()].rstrip().endswith(content))
            spans.append((start, found.end() if found and is_end else end))
        return text, spans

    def _find_start(self, conversation: Conversation, index: int, text: str) -> int:
        """Return where in the text the assistant begins to speak after so many messages."""
        before = self.render(conversation._replace(messages=conversation.messages[:index]), adds_prompt=True)
        before = MARK.sub("", before)
        if text.startswith(before):
            return len(before)
        if conversation.prompt is not None:
            raise InputError(
                f"{conversation.where}: the chat template of {self.name} changes the prompt when a completion follows, "
                "so the completion cannot be found; write it as messages"
            )
        raise InputError(
            f"{conversation.where}: the chat template of {self.name} changes earlier turns when another follows, so "
            "the assistant's tokens cannot be found; put {% generation %} around them in it"
        )


def read_template(place: Published) -> ChatTemplate | None:
    """Read a model's chat template; None if it has none."""
    config, file = place.find(TOKENIZER_CONFIG_FILE), place.find(TEMPLATE_FILE)
    try:
        facts = json.loads(config.read_text(encoding="utf-8")) if config else {}
        text = file.read_text(encoding="utf-8") if file else facts.get("chat_template")
        if isinstance(text, list):  # several by name
            text = next((entry["template"] for entry in text if entry["name"] == "default"), None)
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
