"""The GPT-2 recipe.

    tpuswarm train gpt2-tiny --data tinyshakespeare.txt

The tiny size is nanoGPT's published CPU set-up (4 layers, 4 heads, 128 wide, context 64, characters, batch 12, 2,000
steps, learning rate 1e-3 to 1e-4, warm-up 100 steps, beta2 0.99, no dropout; its README gives validation loss 1.88 on
tinyshakespeare). The others are OpenAI's released sizes with GPT-3's learning rates (Brown et al. 2020, table 2.1).
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tpuswarm.config.limits import NUMBER_LIMITS
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError, NoSuchSplit, TpuswarmError
from tpuswarm.recipes.gpt2.config import (
    DEFAULT_HELD_OUT_SHARE,
    GPT2_VOCAB_SIZE,
    MOMENTS,
    OPTIMIZERS,
    SIZES,
    Config,
    Kind,
)
from tpuswarm.recipes.gpt2.hub import PREFIX, RELEASED, is_place, open_published
from tpuswarm.train.recipe import Options, Recipe, Source

if TYPE_CHECKING:  # methods import JAX, so that a wrong option fails before it loads
    import jax

    from tpuswarm.recipes.gpt2.tokenizer import Tokenizer
    from tpuswarm.recipes.gpt2.tokens import Tokens
    from tpuswarm.train.supervised_program import SupervisedProgram

PEAK_LR = {"tiny": 1e-3, "124m": 6e-4, "355m": 3e-4, "774m": 2.5e-4, "1558m": 2e-4}
FAKE_VOCAB_SIZE = 65
TINY_BPE_VOCAB_SIZE = 4096
"""For a BPE trained on the text; the larger sizes use GPT-2's vocabulary."""
SEPARATORS = ("endoftext", "none")
LIMITS: dict[str, Mapping[str, float]] = {
    **{name: {"least": 1} for name in ("layers", "heads", "width", "vocab")},
    "context": {"least": 2},
    "dropout": {"least": 0, "below": 1},
    "lr": {"above": 0},
    "lr_end": {"least": 0},
    "warmup": {"least": 0, "below": 1},  # a share of the run
    "beta2": {"least": 0, "below": 1},
    "weight_decay": {"least": 0},
    "held_out": {"least": 0, "below": 1},  # a share of the text
    "seed": NUMBER_LIMITS["seed"],
}


class GPT2(Recipe):
    """One GPT-2 and its text; options that are None follow from `size` or from the data.

    - data: path or URL of text, `fake` for random tokens, None for the Python standard library's source.
    - json_field: the field with the text in .jsonl files; `none` reads them as plain text.
    - separator: `endoftext` puts <|endoftext|> between files and between .jsonl lines; `none` puts nothing.
    - held_out: share of the text, at its end, that is not trained on.
    - tokenizer: characters (of the data, or `alphabet`), bytes, bpe (trained on the data for a vocabulary of `vocab`;
      `tokenizer_digest` is the fingerprint of a known one), or a published model's (gpt2, hf:ORG/NAME, hf:DIR).
    - optimizer: adamw, muon (for the layers' matrices) or adafactor (with the smallest state).
    - moments: bf16 halves the first moment of adamw and muon.
    - lr: peak learning rate, reached after the share `warmup` of the run; a cosine lowers it to lr_end.
    - seed: of the order of the rows.
    """

    forms = ("remat", "accumulate")
    identity = ("tokenizer", "alphabet", "tokenizer_digest")
    home: Path | None = None
    target = "tpuswarm.recipes.gpt2.recipe:GPT2"

    def __init__(
        self,
        *,
        size: str = "tiny",
        data: str | None = None,
        json_field: str | None = None,
        separator: str | None = None,
        held_out: float | None = None,
        tokenizer: str | None = None,
        alphabet: str | None = None,
        tokenizer_digest: str | None = None,
        layers: int | None = None,
        heads: int | None = None,
        width: int | None = None,
        context: int | None = None,
        vocab: int | None = None,
        dropout: float = 0.0,
        optimizer: str = "adamw",
        moments: str = "f32",
        lr: float | None = None,
        lr_end: float | None = None,
        warmup: float | None = None,
        beta2: float | None = None,
        weight_decay: float = 0.1,
        seed: int = 0,
    ):
        if size not in SIZES:
            raise InputError(f"unknown size {size!r}; {did_you_mean(size, SIZES)}")
        is_tiny = size == "tiny"
        default_shape = dict(zip(("layers", "heads", "width", "context"), SIZES[size], strict=True))
        given = {"layers": layers, "heads": heads, "width": width, "context": context}
        self.name = f"gpt2-{size}"
        self._is_local = data is not None and data != "fake" and "://" not in data
        self._data = str(Path(str(data)).expanduser().absolute()) if self._is_local else data
        self._size, self._seed = size, seed
        self._shape = {name: default_shape[name] if value is None else value for name, value in given.items()}
        self._json_field, self._separator, self._held_out = json_field, separator, held_out
        self._has_default_tokenizer = tokenizer is None
        tokenizer = tokenizer or ("characters" if is_tiny else "gpt2")
        self._published = _absolute(tokenizer) if is_place(tokenizer) else None
        self._kind: Kind = "bpe" if self._published else _kind(tokenizer)
        self._alphabet, self._tokenizer_digest = alphabet, tokenizer_digest
        tiny_vocab = TINY_BPE_VOCAB_SIZE if self._kind == "bpe" and not self._published else None
        self._vocab = vocab if vocab is not None else tiny_vocab if is_tiny else GPT2_VOCAB_SIZE
        self._dropout, self._optimizer, self._moments = dropout, optimizer, moments
        self._lr = PEAK_LR[size] if lr is None else lr
        self._lr_end = self._lr / 10 if lr_end is None else lr_end
        self._warmup = (0.05 if is_tiny else 0.02) if warmup is None else warmup
        self._beta2 = (0.99 if is_tiny else 0.95) if beta2 is None else beta2
        self._weight_decay = weight_decay
        self._check()
        self.option_defaults = {
            **self._shape, "tokenizer": tokenizer, "lr": self._lr, "lr_end": self._lr_end, "warmup": self._warmup,
            "beta2": self._beta2, "held_out": DEFAULT_HELD_OUT_SHARE, **({} if is_tiny else {"vocab": self._vocab}),
        }  # fmt: skip
        self.defaults = {
            "batch": 12 if is_tiny else 64,
            "steps": 2_000 if is_tiny else 20_000,
            "clip": 1.0,
            "decay": r"(^wte|^wpe|/w)$",
            "outer": "average" if is_tiny else "nesterov",
        }

    def require_data(self) -> None:
        """Raise InputError if a local path has no text; a server is contacted later, when its files are read."""
        from tpuswarm.recipes.gpt2.text import open_text

        if self._is_local:
            open_text(self._data)

    def _check(self) -> None:
        values = self._shape | {name: getattr(self, f"_{name}") for name in LIMITS if name not in self._shape}
        for name, limits in LIMITS.items():
            if values[name] is not None:
                check_number(values[name], name, **limits)
        if self._optimizer not in OPTIMIZERS:
            raise InputError(f"unknown optimizer {self._optimizer!r}; {did_you_mean(self._optimizer, OPTIMIZERS)}")
        if self._moments not in MOMENTS:
            raise InputError(f"unknown moments {self._moments!r}; {did_you_mean(self._moments, MOMENTS)}")
        if self._moments != "f32" and self._optimizer == "adafactor":
            raise InputError("adafactor has no first moment: leave --moments out")
        if self._separator not in (None, *SEPARATORS):
            raise InputError(f"unknown separator {self._separator!r}; {did_you_mean(self._separator, SEPARATORS)}")
        if self._separator == "endoftext" and self._kind != "bpe":
            raise InputError(f"{self._kind} have no <|endoftext|>; use --tokenizer bpe or gpt2, or --separator none")
        if self._shape["width"] % self._shape["heads"]:
            raise InputError(
                f"a width of {self._shape['width']} does not divide evenly over {self._shape['heads']} heads; "
                "make --width a multiple of --heads"
            )

    def options(self) -> dict[str, Any]:
        """Return every option that rebuilds this recipe, including the alphabet of its data."""
        tokenizer_key = {self.tokenizer.kind: self.tokenizer.key} if self.tokenizer else {}
        options = {
            "size": self._size,
            "data": self._data,
            "json_field": self._json_field,
            "separator": self._separator,
            "held_out": self._held_out,
            "tokenizer": self._kind,
            "alphabet": tokenizer_key.get("characters"),
            "tokenizer_digest": tokenizer_key.get("bpe"),
            **self._shape,
            "vocab": self.config.vocab,
            "dropout": self._dropout,
            "optimizer": None if self._optimizer == "adamw" else self._optimizer,  # older runs do not have it
            "moments": None if self._moments == "f32" else self._moments,
            "lr": self._lr,
            "lr_end": self._lr_end,
            "warmup": self._warmup,
            "beta2": self._beta2,
            "weight_decay": self._weight_decay,
            "seed": self._seed,
        }
        return {name: value for name, value in options.items() if value is not None}

    def describe(self) -> dict[str, str]:
        """Describe the shape, the text and the schedule."""
        shape = self._shape
        words = {
            "model": f"{shape['layers']} layers, width {shape['width']}, context {shape['context']}",
            "data": "random tokens",
            "learning rate": f"{self._lr:g} after a warm-up of {self._warmup:.0%}, then a cosine to {self._lr_end:g}",
        }
        if self._data != "fake":
            unit = self._kind if self._kind in ("characters", "bytes") else "tokens"
            held_out, _ = self._held_out_part()
            trained = len(self._tokens.array) - held_out
            words["data"] = f"{trained:,} {unit} to train on, {held_out:,} held out"
        return words

    def share(self, folder: Path) -> dict[str, Any]:
        """Copy the tokens; fake ones need no files."""
        if self._data == "fake":
            return {}
        from tpuswarm.recipes.gpt2.tokens import share_tokens

        share_tokens(self._tokens, folder)
        return {"data": str(folder)}

    def keep(self, folder: Path) -> None:
        """Write a BPE's tokenizer.json."""
        from tpuswarm.recipes.gpt2.tokenizer import TOKENIZER_FILE, Bpe
        from tpuswarm.train.process.atomic import write_atomically
        from tpuswarm.train.run.directory import writing

        if isinstance(self.tokenizer, Bpe):
            with writing(folder / TOKENIZER_FILE):
                write_atomically(folder / TOKENIZER_FILE, self.tokenizer.text)

    @cached_property
    def _tokens(self) -> "Tokens":
        from tpuswarm.recipes.gpt2.text import NO_FIELD
        from tpuswarm.recipes.gpt2.tokens import Reading, prepare_tokens

        field = self._json_field or "text"
        has_ends = None if self._separator is None else self._separator == "endoftext"
        return prepare_tokens(
            self._data,
            self._kind,
            given=self._known_tokenizer,
            key=None if self._published else self._tokenizer_digest,
            vocab=self._vocab or 0,
            reading=Reading(None if field == NO_FIELD else field, has_ends),
        )

    @cached_property
    def _known_tokenizer(self) -> "Tokenizer | None":
        """The tokenizer, unless it must be made from the text."""
        from tpuswarm.recipes.gpt2.tokenizer import TOKENIZER_FILE, Bpe, Bytes, Characters, read_bpe

        if self._kind == "bytes":
            return Bytes()
        if self._kind == "characters":
            return Characters(self._alphabet) if self._alphabet is not None else None
        if self._published:
            from tpuswarm.recipes.gpt2.pretrained import read_tokenizer

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
                raise InputError(f"{self._published} has no BPE; use --tokenizer gpt2, or hf:… of a model that has one")
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
        return self._known_tokenizer or self._tokens.tokenizer

    @cached_property
    def config(self) -> Config:
        """The model's shape; a tiny model's vocabulary is that of its tokenizer."""
        is_gpt2s = self._has_default_tokenizer and self._published and self._data != "fake"  # needs no download
        needed = GPT2_VOCAB_SIZE if is_gpt2s else self.tokenizer.vocab if self.tokenizer else 0
        vocab = self._vocab if self._vocab is not None else needed or FAKE_VOCAB_SIZE
        if needed > vocab:
            raise InputError(
                f"the tokenizer ({self._kind}) needs a vocabulary of {needed}, not {vocab}; use --vocab {needed}"
            )
        return Config(**self._shape, vocab=vocab, dropout=self._dropout)

    def program(self, options: Options) -> "SupervisedProgram":
        """Return the program; it supports every option."""
        from tpuswarm.recipes.gpt2.program import make_program

        return make_program(
            self.config, options, self.schedule, self._beta2, self._weight_decay, self._optimizer, self._moments
        )

    def schedule(self, progress: "jax.Array") -> "jax.Array":
        """Return the learning rate at a share of the run: linear warm-up, then a cosine to lr_end."""
        from tpuswarm.recipes.gpt2.program import warmup_then_cosine

        return warmup_then_cosine(progress, self._lr, self._lr_end, self._warmup)

    def data(self, split: str) -> Source:
        """Return the rows of a split; the end of the text is held out."""
        from tpuswarm.recipes.gpt2.tokens import FakeTokens, TokenSource, split_tokens

        context = self._shape["context"]
        if split not in ("train", "validation", "all"):
            raise NoSuchSplit(f"a text has no {split} part; evaluate it on another text, with --data")
        if self._data == "fake":
            return FakeTokens(self.config.vocab, context, self._seed, split == "validation")
        text = self._data or "the Python standard library"
        name = text if split == "all" else f"the {split} part of {text}"
        if split == "validation" and self._held_out == 0:
            raise NoSuchSplit(f"nothing of {text} is held out (held-out is 0)")
        held_out, digest = self._held_out_part()
        array = split_tokens(self._tokens.array, split, held_out)
        if split == "validation" and self._held_out is None and len(array) <= context:  # held_out is the default
            raise NoSuchSplit(f"{name} has {len(array)} tokens, fewer than one row of {context} + 1: use more text")
        return TokenSource(array, context, self._seed, digest, name)

    def _held_out_part(self) -> tuple[int, str]:
        """Return the number of held-out tokens, and the digest of tokens with such a split."""
        tokens = self._tokens
        if self._held_out is None and tokens.held_out is not None:
            return tokens.held_out, f"{tokens.digest}-{tokens.held_out}"
        share = DEFAULT_HELD_OUT_SHARE if self._held_out is None else self._held_out
        return int(len(tokens.array) * share), tokens.digest

    def sample(self, state: Any, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
        """Return a continuation of `prompt`; an empty prompt starts from a line break."""
        if self.tokenizer is None:
            raise InputError("a model trained on fake data cannot generate text")
        from tpuswarm.recipes.gpt2.sample import generate
        from tpuswarm.train.supervised_program import inference_params

        start = self.tokenizer.encode(prompt or "\n").tolist()
        params = inference_params(state)
        return self.tokenizer.decode(generate(params, start, tokens, temperature, seed, self.config, Options()))

    @classmethod
    def options_at(cls, place: str) -> dict[str, Any]:
        """Return the options for a published model: its tokenizer, if it has one, and the size of its vocabulary."""
        published = open_published(place)  # before JAX loads
        from tpuswarm.recipes.gpt2 import pretrained
        from tpuswarm.recipes.gpt2.tokenizer import Characters

        vocab = pretrained.read_config(published).vocab  # first, because it refuses other architectures
        theirs = pretrained.read_tokenizer(published)
        if theirs and theirs.vocab > vocab:
            raise InputError(
                f"the tokenizer of {place} does not match its weights: it has {theirs.vocab} tokens, they have "
                f"{vocab}; restore the original, or remove the tokens that were added"
            )
        if isinstance(theirs, Characters):
            return {"tokenizer": theirs.kind, "alphabet": theirs.alphabet, "vocab": vocab}
        return ({"tokenizer": place} if theirs else {}) | {"vocab": vocab}

    def load_shared(self, place: str, like: Any) -> Any:
        """Read the weights of a published model of this shape; a shorter context takes its first positions."""
        from tpuswarm.recipes.gpt2 import pretrained

        published = open_published(place)
        pretrained.check_shape(published, self.config)
        theirs = pretrained.read_tokenizer(published) if self.tokenizer else None
        if theirs and self.tokenizer and theirs.key != self.tokenizer.key:
            raise InputError(
                f"the weights of {place} belong to another tokenizer ({theirs.vocab} tokens) than this one "
                f"({self.tokenizer.kind}, {self.tokenizer.vocab} tokens); leave out --tokenizer, or use --tokenizer "
                f"{place}"
            )
        return pretrained.load(published, self.config, like)

    def shared_digest(self, place: str) -> str:
        """Return the commit of a hub's model, or the SHA-256 of the weights in a folder."""
        from tpuswarm.recipes.gpt2 import pretrained

        published = open_published(place)
        return published.commit or pretrained.digest(published)

    def export(self, state: Any, folder: Path) -> None:
        """Write model.safetensors, config.json and the tokenizer for transformers."""
        from tpuswarm.recipes.gpt2 import export
        from tpuswarm.train.supervised_program import inference_params

        export.write(inference_params(state), self.config, self.tokenizer, folder)


def _kind(name: str) -> Kind:
    kinds: tuple[Kind, ...] = get_args(Kind)
    if name not in kinds:
        names = [*kinds, *RELEASED]
        raise InputError(f"unknown tokenizer {name!r}; {did_you_mean(name, names)}, or hf:ORG/NAME or hf:DIR")
    return next(kind for kind in kinds if kind == name)


def _absolute(place: str) -> str:
    """Return a published model's name with an absolute path."""
    folder = Path(place.removeprefix(PREFIX)).expanduser()
    return f"{PREFIX}{folder.absolute()}" if place.startswith(PREFIX) and folder.is_dir() else place
