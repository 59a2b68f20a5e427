"""The text of a language model: its options, its tokenizer, and the rows of its splits."""

import json
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tpuswarm.config.limits import NUMBER_LIMITS
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError, NoSuchSplit, TpuswarmError
from tpuswarm.recipes.language.config import DEFAULT_HELD_OUT_SHARE, Kind
from tpuswarm.recipes.language.hub import RELEASED, Published, absolute_place, is_place, open_published
from tpuswarm.recipes.language.mixture import (
    BLOCK_ROWS,
    MAX_BLOCK_ROWS,
    DataSet,
    MixedSource,
    divide,
    parse_data,
    set_names,
)
from tpuswarm.recipes.prepared import is_complete, read_description
from tpuswarm.train.recipe import Recipe, Source

if TYPE_CHECKING:
    from tpuswarm.recipes.language.chat.rows import ChatSource
    from tpuswarm.recipes.language.chat.template import ChatTemplate
    from tpuswarm.recipes.language.tokenizer import Tokenizer
    from tpuswarm.recipes.language.tokens import Tokens

SEPARATORS = ("endoftext", "none")
PREVIEW_CHARS = 100


class TextRecipe(Recipe):
    """A recipe that trains on text; `LanguageModel` documents its options."""

    takes_conversations = False
    """Whether it trains on conversations, too."""
    home: Path | None = None

    def __init__(
        self,
        *,
        data: str | list[str] | None,
        json_field: str | None,
        separator: str | None,
        held_out: float | None,
        tokenizer: str,
        has_default_tokenizer: bool,
        alphabet: str | None,
        tokenizer_digest: str | None,
        bpe_vocab: int,
        context: int,
        seed: int,
    ):
        sets = parse_data(data) if data is not None else []
        self._sets = [one._replace(place=_absolute(one.place)) for one in sets]
        self._data = "\n".join(one.text for one in self._sets) if sets else None
        self._json_field, self._separator, self._held_out = json_field, separator, held_out
        self._has_default_tokenizer = has_default_tokenizer
        self._published = absolute_place(tokenizer) if is_place(tokenizer) else None
        self._kind: Kind = "bpe" if self._published else _kind(tokenizer)
        self._alphabet, self._tokenizer_digest = alphabet, tokenizer_digest
        self._bpe_vocab, self._context, self._seed = bpe_vocab, context, seed
        check_number(context, "context", least=2)
        if held_out is not None:  # a share of the text
            check_number(held_out, "held_out", least=0, below=1)
        check_number(seed, "seed", **NUMBER_LIMITS["seed"])
        if separator not in (None, *SEPARATORS):
            raise InputError(f"unknown separator {separator!r}; {did_you_mean(separator, SEPARATORS)}")
        if separator == "endoftext" and self._kind != "bpe":
            raise InputError(f"{self._kind} have no <|endoftext|>; use --tokenizer bpe or gpt2, or --separator none")

    def _text_options(self) -> dict[str, Any]:
        """Return the options that rebuild it, None for those of older runs."""
        tokenizer_key = {self.tokenizer.kind: self.tokenizer.key} if self.tokenizer else {}
        return {
            "data": self._data,
            "json_field": "messages" if self._is_chat and not self.set_names else self._json_field,
            "separator": self._separator,
            "held_out": self._held_out,
            "tokenizer": self._kind,
            "alphabet": tokenizer_key.get("characters"),
            "tokenizer_digest": tokenizer_key.get("bpe"),
            "context": self._context,
            "seed": self._seed,
        }

    @property
    def vocab(self) -> int:
        """The model's vocabulary."""
        raise NotImplementedError

    @cached_property
    def set_names(self) -> list[str]:
        """A name of each data set, if there are several."""
        return set_names([one.place for one in self._sets]) if len(self._sets) > 1 else []

    @cached_property
    def _parts(self) -> "list[TextRecipe]":
        """A recipe of each data set, if there are several, else this one.

        Raises InputError if they would make different tokenizers.
        """
        if not self.set_names:
            return [self]
        if self._known_tokenizer is None and self._tokenizer_digest is None:
            raise InputError(
                f"several data sets need one tokenizer, and {self._kind} are made from one set: use --tokenizer bytes, "
                "gpt2, hf:ORG/NAME or hf:DIR"
            )
        parts = [copy(self) for _ in self._sets]
        for part, one in zip(parts, self._sets, strict=True):
            part._data, part._sets, part.set_names = one.place, [DataSet(one.place, None)], []
        return parts

    def _describe_data(self) -> str:
        if self.set_names:
            parts = zip(self.set_names, self._sets, self._parts, strict=True)
            weights = [one.weight or 0.0 for one in self._sets]
            return "; ".join(
                f"{name}{f' ({one.weight / sum(weights):.1%})' if one.weight else ''}: {part._describe_data()}"
                for name, one, part in parts
            )
        if self._data == "fake":
            return "random tokens"
        if self._is_chat:
            return self._describe_conversations()
        unit = self._kind if self._kind in ("characters", "bytes") else "tokens"
        held_out, _ = self._held_out_part()
        return f"{len(self._tokens.array) - held_out:,} {unit} to train on, {held_out:,} held out"

    @property
    def context(self) -> int:
        """Tokens of a row."""
        return self._context

    def _describe_conversations(self) -> str:
        train = self._conversations("train")
        try:
            held_out = self._conversations("validation").conversations
        except NoSuchSplit:
            held_out = 0
        return f"{train.description}, {held_out:,} held out"

    def require_data(self) -> None:
        """Raise InputError if a local path has no text; a server is contacted later, when its files are read."""
        from tpuswarm.recipes.language.text import open_text

        for one in self._sets:
            if _is_path(one.place):
                open_text(one.place)

    def share(self, folder: Path) -> dict[str, Any]:
        """Copy the tokens; fake ones need no files."""
        if self._data == "fake":
            return {}
        from tpuswarm.recipes.language.tokens import share_tokens

        if not self.set_names:
            share_tokens(self._tokens, folder)
            return {"data": str(folder)}
        shared = [one._replace(place=str(folder / name)) for one, name in zip(self._sets, self.set_names, strict=True)]
        for part, one in zip(self._parts, shared, strict=True):
            share_tokens(part._tokens, Path(one.place))
        return {"data": "\n".join(one.text for one in shared)}

    def keep(self, folder: Path) -> None:
        """Write a BPE's tokenizer.json, and its chat template."""
        from tpuswarm.recipes.language.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Bpe
        from tpuswarm.train.process.atomic import write_atomically
        from tpuswarm.train.run.directory import writing

        if isinstance(self.tokenizer, Bpe):
            with writing(folder / TOKENIZER_FILE):
                write_atomically(folder / TOKENIZER_FILE, self.tokenizer.text)
                if self.chat_template:
                    write_atomically(folder / TOKENIZER_CONFIG_FILE, json.dumps(self.chat_template.facts, indent=2))

    @cached_property
    def _tokens(self) -> "Tokens":
        from tpuswarm.recipes.language.text import MESSAGES, NO_FIELD
        from tpuswarm.recipes.language.tokens import Reading, prepare_tokens

        field = MESSAGES if self._is_chat else self._json_field or "text"
        has_ends = None if self._separator is None else self._separator == "endoftext"
        return prepare_tokens(
            self._data,
            self._kind,
            given=self._known_tokenizer,
            key=None if self._published else self._tokenizer_digest,
            vocab=self._bpe_vocab,
            reading=Reading(
                None if field == NO_FIELD else field, has_ends, (lambda: self.chat_template) if self._is_chat else None
            ),
        )

    @cached_property
    def _is_chat(self) -> bool:
        """Whether the data holds conversations, or prompts and completions."""
        from tpuswarm.recipes.language.text import MESSAGES, ROWS, holds_conversations

        if self.set_names:
            return any(part._is_chat for part in self._parts)
        if not self.takes_conversations or self._data is None or self._json_field is not None:
            return self.takes_conversations and self._json_field == MESSAGES
        if not _is_path(self._data):
            return ROWS.search(self._data) is not None and holds_conversations(self._data)
        if is_complete(Path(self._data)):
            return bool(read_description(Path(self._data)).get("conversations"))
        return holds_conversations(self._data)

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The chat template that came with the tokenizer; None if it has none."""
        if not self.takes_conversations or not (self._published or self.home):
            return None
        from tpuswarm.recipes.language.chat.template import read_template

        return read_template(open_published(self._published) if self._published else Published("the run", self.home))

    @cached_property
    def _known_tokenizer(self) -> "Tokenizer | None":
        """The tokenizer, unless it must be made from the text."""
        from tpuswarm.recipes.language.tokenizer import TOKENIZER_FILE, Bpe, Bytes, Characters, read_bpe

        if self._kind == "bytes":
            return Bytes()
        if self._kind == "characters":
            return Characters(self._alphabet) if self._alphabet is not None else None
        if self._published:
            from tpuswarm.recipes.language.published_tokenizer import read_tokenizer

            try:
                published = read_tokenizer(open_published(self._published))
            except TpuswarmError as error:
                if not self._has_default_tokenizer:
                    raise
                raise type(error)(
                    f"{self.name} reads text with GPT-2's tokenizer: {error}; or use --tokenizer bpe, which trains "
                    "one on the text, or --tokenizer bytes"
                ) from error
            if not isinstance(published, Bpe):
                found = (
                    "characters as its tokens" if published else "no tokenizer.json, and no vocab.json with merges.txt"
                )
                raise InputError(
                    f"{self._published} has {found}; use --tokenizer hf:… of a model that has the same tokens"
                )
            return published
        if self._tokenizer_digest is None or self.home is None or not (self.home / TOKENIZER_FILE).exists():
            return None
        saved = read_bpe(self.home / TOKENIZER_FILE)
        if saved.key != self._tokenizer_digest:
            raise InputError(
                f"{self.home / TOKENIZER_FILE} is not the tokenizer of this run ({saved.key[:12]}…, not "
                f"{self._tokenizer_digest[:12]}…); restore the original"
            )
        return saved

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer; None for fake data."""
        if self._data == "fake":
            return None
        return self._known_tokenizer or self._parts[0]._tokens.tokenizer

    def data(self, split: str) -> Source:
        """Return the rows of a split; the end of the text is held out."""
        from tpuswarm.recipes.language.tokens import FakeTokens, TokenSource, split_tokens

        if self.set_names:
            return self._mix(split)
        context = self._context
        if self._is_chat and split in ("train", "validation", "all"):
            return self._conversations(split)
        if split not in ("train", "validation", "all"):
            raise NoSuchSplit(f"a text has no {split} part; evaluate it on another text, with --data")
        if self._data == "fake":
            return FakeTokens(self.vocab, context, self._seed, split == "validation")
        text = self._data or "the Python standard library"
        name = text if split == "all" else f"the {split} part of {text}"
        if split == "validation" and self._held_out == 0:
            raise NoSuchSplit(f"nothing of {text} is held out (held-out is 0)")
        held_out, digest = self._held_out_part()
        array = split_tokens(self._tokens.array, split, held_out)
        if split == "validation" and self._held_out is None and len(array) <= context:  # held_out is the default
            raise NoSuchSplit(f"{name} has {len(array)} tokens, fewer than one row of {context} + 1: use more text")
        return TokenSource(array, context, self._seed, digest, name)

    def _mix(self, split: str) -> Source:
        """Return the rows of all data sets; without weights, and held-out ones, each once an epoch."""
        sources, missing = list[Any](), None
        for part in self._parts:
            try:
                sources.append(part.data(split))
            except NoSuchSplit as error:
                sources.append(None)
                missing = error
        if missing and not any(sources):
            raise missing
        kinds = {part._tokens.tokenizer.key for part in self._parts}
        if len(kinds) > 1:
            raise InputError(
                f"the tokens of {' and '.join(self.set_names)} are of {len(kinds)} tokenizers: use their text"
            )
        rows = [source.rows_per_epoch if source else 0 for source in sources]
        weights = [one.weight for one in self._sets if one.weight is not None]
        if split == "train":
            quotas = divide(BLOCK_ROWS, weights) if weights else divide(min(sum(rows), MAX_BLOCK_ROWS), rows)
        else:
            quotas = divide(sum(rows), rows)
        return MixedSource(sources, quotas, self._seed, self._is_chat)

    def _conversations(self, split: str) -> "ChatSource":
        from tpuswarm.recipes.language.chat.rows import ChatSource, split_conversations

        name = self._data if split == "all" else f"the {split} part of {self._data}"
        array = split_conversations(self._tokens.array, split, self._held_out_share)
        try:
            return ChatSource(array, self._context, self._seed, self._tokens.digest, str(name))
        except InputError as error:
            if split == "validation" and not self._held_out:
                raise NoSuchSplit(str(error)) from error
            raise

    def preview(self, *, quick: bool = False) -> list[list[tuple[str, bool]]]:
        """Return the first conversation, in pieces, each with whether its loss counts; empty for plain text.

        Of several data sets, the first row of each.
        """
        if self.set_names:
            firsts = [next(iter(part.preview(quick=quick) or [part._first_text(quick)])) for part in self._parts]
            return [[(f"{name}: ", False), *first] for name, first in zip(self.set_names, firsts, strict=True)]
        from tpuswarm.recipes.language.chat.conversations import encode_conversations
        from tpuswarm.recipes.language.chat.rows import first_pieces
        from tpuswarm.recipes.language.text import MESSAGES, open_text
        from tpuswarm.recipes.language.tokenizer import Bpe

        tokenizer = (self._known_tokenizer if quick else self.tokenizer) if self._is_chat else None
        if not isinstance(tokenizer, Bpe):
            return []
        text = open_text(self._data, MESSAGES) if quick else None
        array = next(encode_conversations(text, self.chat_template, tokenizer), None) if text else self._tokens.array
        if array is None:
            return []
        return [[(tokenizer.decode(tokens), counts) for tokens, counts in first_pieces(array, self._context)]]

    def _first_text(self, quick: bool) -> list[tuple[str, bool]]:
        """Return the beginning of a plain text, which counts."""
        from tpuswarm.recipes.language.text import open_text

        if quick or self.tokenizer is None:
            piece = next(open_text(self._data, self._json_field or "text").pieces(), "")
            return [(piece[:PREVIEW_CHARS], True)]
        return [(self.tokenizer.decode(self._tokens.array[: self._context].tolist())[:PREVIEW_CHARS], True)]

    @property
    def _held_out_share(self) -> float:
        return DEFAULT_HELD_OUT_SHARE if self._held_out is None else self._held_out

    def _held_out_part(self) -> tuple[int, str]:
        """Return the number of held-out tokens, and the digest of tokens with such a split."""
        tokens = self._tokens
        if self._held_out is None and tokens.held_out is not None:
            return tokens.held_out, f"{tokens.digest}-{tokens.held_out}"
        return int(len(tokens.array) * self._held_out_share), tokens.digest


def _is_path(place: str) -> bool:
    return place != "fake" and "://" not in place


def _absolute(place: str) -> str:
    return str(Path(place).expanduser().absolute()) if _is_path(place) else place


def _kind(name: str) -> Kind:
    kinds: tuple[Kind, ...] = get_args(Kind)
    if name not in kinds:
        names = [*kinds, *RELEASED]
        raise InputError(f"unknown tokenizer {name!r}; {did_you_mean(name, names)}, or hf:ORG/NAME or hf:DIR")
    return next(kind for kind in kinds if kind == name)
