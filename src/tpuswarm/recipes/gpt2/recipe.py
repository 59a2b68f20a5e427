"""GPT-2 as a recipe.

    tpuswarm train gpt2-tiny --data tinyshakespeare.txt

The tiny size is nanoGPT's published CPU set-up (4 layers, 4 heads, 128 wide, context 64, characters, batch 12, 2,000
steps, learning rate 1e-3 to 1e-4, warm-up 100 steps, beta2 0.99, no dropout; its README gives validation loss 1.88 on
tinyshakespeare). The others are OpenAI's released sizes with GPT-3's learning rates (Brown et al. 2020, table 2.1).
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tpuswarm.config.limits import NUMBER_LIMITS as SETTINGS
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError, NoSuchSplit, TpuswarmError
from tpuswarm.recipes.gpt2.config import GPT2_VOCAB, MOMENTS, OPTIMIZERS, SIZES, Config, Kind
from tpuswarm.recipes.gpt2.hub import PREFIX, RELEASED, is_place, open_published
from tpuswarm.train.recipe import Options, Recipe, Source

if TYPE_CHECKING:  # a wrong option is answered before JAX is loaded: what needs it is imported by the method that does
    import jax

    from tpuswarm.recipes.gpt2.tokenizer import Tokenizer
    from tpuswarm.recipes.gpt2.tokens import Tokens
    from tpuswarm.train.supervised_program import SupervisedProgram

PEAK_LR = {"tiny": 1e-3, "124m": 6e-4, "355m": 3e-4, "774m": 2.5e-4, "1558m": 2e-4}
FAKE_VOCAB = 65
BPE_VOCAB = 4096
"""Of a BPE that is trained for the tiny size; the others have GPT-2's."""
FAKE = "fake"
ENDOFTEXT = "endoftext"
SEPARATORS = (ENDOFTEXT, "none")
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
    "seed": SETTINGS["seed"],
}
"""Of the options that are numbers."""


class GPT2(Recipe):
    """One GPT-2 and its text; what is None follows from `size` or from the data.

    - data: path or URL of text, `fake` for random tokens, None for the Python standard library's source.
    - json_field: where the text is in the lines of files called .jsonl; `none` reads them as they are.
    - separator: `endoftext` puts <|endoftext|> between files, and between the lines of .jsonl; `none` nothing.
    - held_out: share of the text, at its end, that is not trained on; 0 is none.
    - tokenizer: characters (of the data, or `alphabet`), bytes, bpe (trained on the data for a vocabulary of `vocab`;
      a known one has its fingerprint in `tokenizer_digest`), or that of a published model (gpt2, hf:ORG/NAME, hf:DIR).
    - optimizer: adamw, muon (for the layers' matrices) or adafactor (whose state is a fraction of the others').
    - moments: bf16 keeps the first moment of adamw and muon in half the bytes.
    - lr: peak learning rate, reached after the share `warmup` of the run and lowered by a cosine to lr_end.
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
        tiny = size == "tiny"
        usual = dict(zip(("layers", "heads", "width", "context"), SIZES[size], strict=True))
        given = {"layers": layers, "heads": heads, "width": width, "context": context}
        self.name = f"gpt2-{size}"
        self._local = data is not None and data != FAKE and "://" not in data
        self._data = str(Path(str(data)).expanduser().absolute()) if self._local else data
        self._size, self._seed = size, seed
        self._shape = {name: usual[name] if value is None else value for name, value in given.items()}
        self._json_field, self._separator, self._held_out = json_field, separator, held_out
        self._usual = tokenizer is None
        tokenizer = tokenizer or ("characters" if tiny else "gpt2")
        self._published = _absolute(tokenizer) if is_place(tokenizer) else None
        self._kind: Kind = "bpe" if self._published else _kind(tokenizer)
        self._alphabet, self._tokenizer_digest = alphabet, tokenizer_digest
        own = None if self._published or self._kind != "bpe" else BPE_VOCAB
        self._vocab = vocab if vocab is not None else own if tiny else GPT2_VOCAB
        self._dropout, self._optimizer, self._moments = dropout, optimizer, moments
        self._lr = PEAK_LR[size] if lr is None else lr
        self._lr_end = self._lr / 10 if lr_end is None else lr_end
        self._warmup = (0.05 if tiny else 0.02) if warmup is None else warmup
        self._beta2 = (0.99 if tiny else 0.95) if beta2 is None else beta2
        self._weight_decay = weight_decay
        self._check()
        self.defaults = {
            "batch": 12 if tiny else 64,
            "steps": 2_000 if tiny else 20_000,
            "clip": 1.0,
            "decay": r"(^wte|^wpe|/w)$",
            "outer": "average" if tiny else "nesterov",
        }

    def require_data(self) -> None:
        """Look at files on this machine; a server is asked when they are read."""
        from tpuswarm.recipes.gpt2.text import open_text

        if self._local:
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
        if self._separator == ENDOFTEXT and self._kind != "bpe":
            raise InputError(f"{self._kind} have no <|endoftext|>; use --tokenizer bpe or gpt2, or --separator none")
        if self._shape["width"] % self._shape["heads"]:
            raise InputError(
                f"a width of {self._shape['width']} does not divide evenly over {self._shape['heads']} heads; "
                "make --width a multiple of --heads"
            )

    def options(self) -> dict[str, Any]:
        """Everything that makes this recipe again, the alphabet of its data included."""
        options = {
            "size": self._size,
            "data": self._data,
            "json_field": self._json_field,
            "separator": self._separator,
            "held_out": self._held_out,
            "tokenizer": self._kind,
            "alphabet": self.tokenizer.key if self.tokenizer and self.tokenizer.kind == "characters" else None,
            "tokenizer_digest": self.tokenizer.key if self.tokenizer and self.tokenizer.kind == "bpe" else None,
            **self._shape,
            "vocab": self.config.vocab,
            "dropout": self._dropout,
            "optimizer": None if self._optimizer == "adamw" else self._optimizer,  # runs from before have none
            "moments": None if self._moments == "f32" else self._moments,
            "lr": self._lr,
            "lr_end": self._lr_end,
            "warmup": self._warmup,
            "beta2": self._beta2,
            "weight_decay": self._weight_decay,
            "seed": self._seed,
        }
        return {name: value for name, value in options.items() if value is not None}

    def share(self, folder: Path) -> dict[str, Any]:
        """The tokens; fake ones need no files."""
        if self._data == FAKE:
            return {}
        from tpuswarm.recipes.gpt2.tokens import share_tokens

        share_tokens(self._tokens, folder)
        return {"data": str(folder)}

    def keep(self, folder: Path) -> None:
        """A BPE, as tokenizer.json."""
        from tpuswarm.recipes.gpt2.bpe import FILE, Bpe
        from tpuswarm.train.process.atomic import write_atomically
        from tpuswarm.train.run.directory import writing

        if isinstance(self.tokenizer, Bpe):
            with writing(folder / FILE):
                write_atomically(folder / FILE, self.tokenizer.text)

    @cached_property
    def _tokens(self) -> "Tokens":
        from tpuswarm.recipes.gpt2.text import NO_FIELD
        from tpuswarm.recipes.gpt2.tokens import Reading, prepare_tokens

        field = self._json_field or "text"
        ends = None if self._separator is None else self._separator == ENDOFTEXT
        return prepare_tokens(
            self._data,
            self._kind,
            given=self._given,
            key=None if self._published else self._tokenizer_digest,
            vocab=self._vocab or 0,
            reading=Reading(None if field == NO_FIELD else field, ends),
        )

    @cached_property
    def _given(self) -> "Tokenizer | None":
        """The tokenizer where the text is not needed to know it."""
        from tpuswarm.recipes.gpt2.bpe import FILE, Bpe, read_bpe
        from tpuswarm.recipes.gpt2.tokenizer import Bytes, Characters

        if self._kind == "bytes":
            return Bytes()
        if self._kind == "characters":
            return Characters(self._alphabet) if self._alphabet is not None else None
        if self._published:
            from tpuswarm.recipes.gpt2.pretrained import read_tokenizer

            try:
                found = read_tokenizer(open_published(self._published))
            except TpuswarmError as error:
                if not self._usual:
                    raise
                raise type(error)(
                    f"{self.name} reads text with GPT-2's tokenizer: {error}; or use --tokenizer bpe, which makes one "
                    "of the text, or --tokenizer bytes"
                ) from error
            if not isinstance(found, Bpe):
                raise InputError(f"{self._published} has no BPE; use --tokenizer gpt2, or hf:… of a model that has one")
            return found
        if self._tokenizer_digest is None or self.home is None or not (self.home / FILE).exists():
            return None
        kept = read_bpe(self.home / FILE)
        if kept.key != self._tokenizer_digest:
            raise InputError(
                f"{self.home / FILE} is not the tokenizer of this run ({kept.key[:12]}…, not "
                f"{self._tokenizer_digest[:12]}…); restore the original"
            )
        return kept

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The one given, else that of the data; None for fake data."""
        if self._data == FAKE:
            return None
        return self._given or self._tokens.tokenizer

    @cached_property
    def config(self) -> Config:
        """The model's shape; a tiny model's vocabulary is that of its tokenizer."""
        known = self._usual and self._published and self._data != FAKE  # GPT-2's own: nothing is fetched for it
        have = GPT2_VOCAB if known else self.tokenizer.vocab if self.tokenizer else 0
        vocab = self._vocab if self._vocab is not None else have or FAKE_VOCAB
        if have > vocab:
            raise InputError(
                f"the tokenizer ({self._kind}) needs a vocabulary of {have}, not {vocab}; use --vocab {have}"
            )
        return Config(**self._shape, vocab=vocab, dropout=self._dropout)

    def program(self, options: Options) -> "SupervisedProgram":
        """The program; supports every option."""
        from tpuswarm.recipes.gpt2.program import make_program

        return make_program(
            self.config, options, self.schedule, self._beta2, self._weight_decay, self._optimizer, self._moments
        )

    def schedule(self, progress: "jax.Array") -> "jax.Array":
        """Learning rate at a share of the run: linear warm-up from a hundredth, then a cosine to lr_end."""
        from tpuswarm.recipes.gpt2.program import warmup_then_cosine

        return warmup_then_cosine(progress, self._lr, self._lr_end, self._warmup)

    def data(self, split: str) -> Source:
        """Rows of a split: the end of the text is held out."""
        from tpuswarm.recipes.gpt2.tokens import HELD_OUT, FakeTokens, TokenSource, split_tokens

        context = self._shape["context"]
        if split not in ("train", "validation", "all"):
            raise NoSuchSplit(f"a text has no {split} part; evaluate it on another text, with --data")
        if self._data == FAKE:
            return FakeTokens(self.config.vocab, context, self._seed + (split == "validation"))
        whole = self._data or "the Python standard library"
        name = whole if split == "all" else f"the {split} part of {whole}"
        held_out = HELD_OUT if self._held_out is None else self._held_out
        if split == "validation" and not held_out:
            raise NoSuchSplit(f"nothing of {whole} is held out (held-out is 0)")
        array = split_tokens(self._tokens.array, split, held_out)
        if split == "validation" and self._held_out is None and len(array) <= context:  # nobody asked for it
            raise NoSuchSplit(f"{name} has {len(array)} tokens, fewer than one row of {context} + 1: use more text")
        return TokenSource(array, context, self._seed, self._tokens.digest, name)

    def sample(self, state: Any, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
        """A continuation of `prompt`; an empty prompt starts from a line's end."""
        if self.tokenizer is None:
            raise InputError("a model trained on fake data cannot generate text")
        from tpuswarm.recipes.gpt2.sample import generate
        from tpuswarm.train.supervised_program import inference_params

        start = self.tokenizer.encode(prompt or "\n").tolist()
        params = inference_params(state)
        return self.tokenizer.decode(generate(params, start, tokens, temperature, seed, self.config, Options()))

    @classmethod
    def options_at(cls, place: str) -> dict[str, Any]:
        """A published model's tokenizer, where it brings one, and the size of its vocabulary."""
        found = open_published(place)  # where there is nothing, that is said before JAX is loaded
        from tpuswarm.recipes.gpt2 import pretrained
        from tpuswarm.recipes.gpt2.tokenizer import Characters

        vocab = pretrained.read_config(found).vocab  # before the tokenizer: another architecture is said as such
        theirs = pretrained.read_tokenizer(found)
        if theirs and theirs.vocab > vocab:
            raise InputError(
                f"the tokenizer of {place} does not match its weights: it has {theirs.vocab} tokens, they have "
                f"{vocab}; restore the original, or remove the tokens that were added"
            )
        brought = {"tokenizer": place} if theirs else {}
        if isinstance(theirs, Characters):
            brought = {"tokenizer": theirs.kind, "alphabet": theirs.alphabet}
        return {**brought, "vocab": vocab}

    def load_shared(self, place: str, like: Any) -> Any:
        """The weights of a published model of this shape; a shorter context takes the first of its positions."""
        from tpuswarm.recipes.gpt2 import pretrained

        found = open_published(place)
        pretrained.check_shape(found, self.config)
        theirs = pretrained.read_tokenizer(found) if self.tokenizer else None
        if theirs and self.tokenizer and theirs.key != self.tokenizer.key:
            raise InputError(
                f"the weights of {place} belong to another tokenizer ({theirs.vocab} tokens) than this one "
                f"({self.tokenizer.kind}, {self.tokenizer.vocab} tokens); leave out --tokenizer, or use --tokenizer "
                f"{place}"
            )
        return pretrained.load(found, self.config, like)

    def shared_digest(self, place: str) -> str:
        """The commit of a hub's model; SHA-256 of the weights in a folder."""
        from tpuswarm.recipes.gpt2 import pretrained

        found = open_published(place)
        return found.commit or pretrained.digest(found)

    def export(self, state: Any, folder: Path) -> None:
        """model.safetensors, config.json and the tokenizer, as transformers reads them."""
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
    """A published model's name that means the same in every folder."""
    folder = Path(place.removeprefix(PREFIX)).expanduser()
    return f"{PREFIX}{folder.absolute()}" if place.startswith(PREFIX) and folder.is_dir() else place
