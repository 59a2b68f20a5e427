"""Answer messages as the assistant."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.recipes.language.chat.template import Conversation, turn_ends
from tpuswarm.recipes.language.language_model import LanguageModel
from tpuswarm.recipes.language.sampling import Sampling, text_of
from tpuswarm.recipes.language.tokenizer import Bpe


def reply(
    recipe: LanguageModel, params: Any, messages: Sequence[Mapping[str, Any]], tokens: int, sampling: Sampling,
    seed: int, stop: Sequence[str] = (),
) -> Iterator[str]:  # fmt: skip
    """Yield the assistant's answer to messages as it is generated, at most so many tokens.

    If the context has no room for it, the oldest messages are left out, two at a time. Raises InputError if the newest
    one alone leaves no room, and for a model without a chat template.
    """
    if recipe.chat_template is None or not isinstance(recipe.tokenizer, Bpe):
        raise InputError(f"{recipe.name} has no chat template, so it cannot chat; use `tpuswarm sample`")
    template, context = replace(recipe.chat_template, date=datetime.now()), recipe.context
    room = min(tokens, context // 4)
    while True:
        text = template.render(Conversation(messages, None, "your message"), adds_prompt=True)
        start = recipe.tokenizer.encode(text).tolist()
        if len(start) + room <= context:
            break
        if len(messages) == 1:
            raise InputError(
                f"your message has {len(start):,} tokens, and the context of {context:,} needs room for an answer: "
                "write less"
            )
        messages = messages[2:]
    ends = {recipe.tokenizer.end, *turn_ends(template, recipe.tokenizer)}
    chunks = recipe.generate(params, start, min(tokens, context - len(start)), sampling, seed)
    yield from text_of(chunks, recipe.tokenizer.decode, ends, stop)
