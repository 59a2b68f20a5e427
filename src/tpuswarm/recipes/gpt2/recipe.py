"""The GPT-2 recipe.

    tpuswarm train gpt2-tiny --data tinyshakespeare.txt

The tiny size is nanoGPT's published CPU set-up (4 layers, 4 heads, 128 wide, context 64, characters, batch 12, 2,000
steps, learning rate 1e-3 to 1e-4, warm-up 100 steps, beta2 0.99, no dropout; its README gives validation loss 1.88 on
tinyshakespeare). The others are OpenAI's released sizes with GPT-3's learning rates (Brown et al. 2020, table 2.1).
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.config import GPT2_VOCAB_SIZE, SIZES, Config
from tpuswarm.recipes.language.hub import open_published
from tpuswarm.recipes.language.language_model import LanguageModel
from tpuswarm.train.recipe import Options

if TYPE_CHECKING:  # methods import JAX, so that a wrong option fails before it loads
    from tpuswarm.recipes.language.sampling import Sampling
    from tpuswarm.train.supervised_program import SupervisedProgram

PEAK_LR = {"tiny": 1e-3, "124m": 6e-4, "355m": 3e-4, "774m": 2.5e-4, "1558m": 2e-4}
TINY_BPE_VOCAB_SIZE = 4096
"""For a BPE trained on the text; the larger sizes use GPT-2's vocabulary."""
SHAPE_LIMITS: dict[str, dict[str, float]] = {
    **{name: {"least": 1} for name in ("layers", "heads", "width")},
    "context": {"least": 2},
    "dropout": {"least": 0, "below": 1},
}


class GPT2(LanguageModel):
    """GPT-2, trained on text.

    - size: one of OpenAI's, or tiny; it gives the defaults.
    - layers, heads, width: of the model.
    - dropout: of embeddings, attention and residuals.
    """

    target = "tpuswarm.recipes.gpt2.recipe:GPT2"

    def __init__(
        self,
        *,
        size: str = "tiny",
        data: str | list[str] | None = None,
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
        schedule: str = "cosine",
        lr_end: float | None = None,
        warmup: float | None = None,
        beta2: float | None = None,
        weight_decay: float = 0.1,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        seed: int = 0,
    ):
        if size not in SIZES:
            raise InputError(f"unknown size {size!r}; {did_you_mean(size, SIZES)}")
        is_tiny = size == "tiny"
        default_shape = dict(zip(("layers", "heads", "width", "context"), SIZES[size], strict=True))
        given = {"layers": layers, "heads": heads, "width": width, "context": context}
        self.name = f"gpt2-{size}"
        self._size, self._dropout = size, dropout
        self._shape = {name: default_shape[name] if value is None else value for name, value in given.items()}
        for name, limits in SHAPE_LIMITS.items():
            check_number({"dropout": dropout, **self._shape}[name], name, **limits)
        if self._shape["width"] % self._shape["heads"]:
            raise InputError(
                f"a width of {self._shape['width']} does not divide evenly over {self._shape['heads']} heads; "
                "make --width a multiple of --heads"
            )
        trains_bpe = is_tiny and tokenizer == "bpe"
        if vocab is None:
            vocab = TINY_BPE_VOCAB_SIZE if trains_bpe else None if is_tiny else GPT2_VOCAB_SIZE
        super().__init__(
            data=data,
            json_field=json_field,
            separator=separator,
            held_out=held_out,
            tokenizer=tokenizer or ("characters" if is_tiny else "gpt2"),
            has_default_tokenizer=tokenizer is None,
            alphabet=alphabet,
            tokenizer_digest=tokenizer_digest,
            vocab=vocab,
            bpe_vocab=vocab or 0,
            context=self._shape["context"],
            optimizer=optimizer,
            moments=moments,
            lr=PEAK_LR[size] if lr is None else lr,
            schedule=schedule,
            lr_end=lr_end,
            warmup=(0.05 if is_tiny else 0.02) if warmup is None else warmup,
            beta2=(0.99 if is_tiny else 0.95) if beta2 is None else beta2,
            weight_decay=weight_decay,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            seed=seed,
        )
        self.option_defaults |= {**self._shape, **({} if is_tiny else {"vocab": vocab})}
        self.defaults = {
            "batch": 12 if is_tiny else 64,
            "steps": 2_000 if is_tiny else 20_000,
            "clip": 1.0,
            "decay": r"(^wte|^wpe|/w)$",
            "outer": "average" if is_tiny else "nesterov",
        }

    def _shape_options(self) -> dict[str, Any]:
        return {"size": self._size, **self._shape, "dropout": self._dropout}

    def _layers_and_width(self) -> tuple[int, int]:
        return self._shape["layers"], self._shape["width"]

    def _needed_vocab(self) -> int:
        if self._has_default_tokenizer and self._published and self._data != "fake":
            return GPT2_VOCAB_SIZE  # without a download
        return super()._needed_vocab()

    @cached_property
    def config(self) -> Config:
        """The model's shape."""
        return Config(**self._shape, vocab=self.vocab, dropout=self._dropout)

    def program(self, options: Options) -> "SupervisedProgram":
        """Return the program; it supports every option."""
        from tpuswarm.recipes.gpt2.program import gpt2_program

        return gpt2_program(self.config, options, self.optimizer(), self.set_names)

    def generate(
        self, params: Any, start: list[int], count: int, sampling: "Sampling", seed: int
    ) -> Iterator[list[int]]:
        """Yield `count` tokens after `start`, in chunks."""
        from tpuswarm.recipes.gpt2.sample import generate

        return generate(params, start, count, sampling, seed, self.config, Options())

    @classmethod
    def options_at(cls, place: str) -> dict[str, Any]:
        """Return the options for a published model: its tokenizer, if it has one, and the size of its vocabulary."""
        published = open_published(place)  # before JAX loads
        from tpuswarm.recipes.gpt2 import pretrained
        from tpuswarm.recipes.language.published_tokenizer import read_tokenizer
        from tpuswarm.recipes.language.tokenizer import Characters

        vocab = pretrained.read_config(published).vocab  # first, because it refuses other architectures
        theirs = read_tokenizer(published)
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
        from tpuswarm.recipes.language.published_tokenizer import read_tokenizer

        published = open_published(place)
        pretrained.check_shape(published, self.config)
        theirs = read_tokenizer(published) if self.tokenizer else None
        if theirs and self.tokenizer and theirs.key != self.tokenizer.key:
            raise InputError(
                f"the weights of {place} belong to another tokenizer ({theirs.vocab} tokens) than this one "
                f"({self.tokenizer.kind}, {self.tokenizer.vocab} tokens); leave out --tokenizer, or use --tokenizer "
                f"{place}"
            )
        return pretrained.load(published, self.config, like)

    def shared_digest(self, place: str) -> str:
        """Return the commit of a hub's model, or the SHA-256 of the weights in a folder."""
        from tpuswarm.recipes.language.weight_files import digest

        published = open_published(place)
        return published.commit or digest(published)

    def export(self, state: Any, folder: Path) -> None:
        """Write model.safetensors, config.json and the tokenizer for transformers."""
        from tpuswarm.recipes.gpt2 import export
        from tpuswarm.train.supervised_program import inference_params

        export.write(inference_params(state), self.config, self.tokenizer, folder)
