"""A language model and its text: what GPT-2 and the other decoders share."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError
from tpuswarm.recipes.language.config import DEFAULT_HELD_OUT_SHARE, MOMENTS, OPTIMIZERS, SCHEDULES
from tpuswarm.recipes.language.text_recipe import TextRecipe

if TYPE_CHECKING:  # methods import JAX, so that a wrong option fails before it loads
    import jax

    from tpuswarm.recipes.language.program import Optimizer
    from tpuswarm.recipes.language.sampling import Sampling

FAKE_VOCAB_SIZE = 65
LIMITS: dict[str, Mapping[str, float]] = {
    "vocab": {"least": 1},
    "lr": {"above": 0},
    "lr_end": {"least": 0},
    "warmup": {"least": 0, "below": 1},  # a share of the run
    "beta2": {"least": 0, "below": 1},
    "weight_decay": {"least": 0},
    "z_loss": {"least": 0},
    "label_smoothing": {"least": 0, "below": 1},
}


class LanguageModel(TextRecipe):
    """A model of text; a subclass gives the model, and the defaults.

    - data: path or URL of text, or `fake` for random tokens; without it, the Python standard library's source. Several
      are mixed; each may end with its weight, as a.txt:0.7.
    - json_field: field with the text in .jsonl and .parquet files; `none` reads them as plain text, `messages` as
      conversations.
    - separator: `endoftext` puts the tokenizer's end of text between files and between .jsonl lines; `none` nothing.
    - held_out: share of the text, at its end, that is not trained on.
    - tokenizer: characters (of the data, or `alphabet`), bytes, bpe (trained on the data for a vocabulary of
      `vocab`), or a published model's (gpt2, hf:ORG/NAME, hf:DIR).
    - alphabet: characters, instead of those of the data.
    - tokenizer_digest: fingerprint of a BPE that was trained before.
    - vocab: size of the model's vocabulary; without it, as large as the tokenizer needs.
    - optimizer: adamw, muon (for the layers' matrices) or adafactor (with the smallest state).
    - moments: bf16 halves the first moment of adamw and muon.
    - lr: peak learning rate, in AdamW's sense for all optimizers.
    - schedule: of the learning rate after the warm-up: cosine, linear, or wsd (constant, linear in the last fifth).
    - lr_end: learning rate at the end of the run.
    - warmup: share of the run in which the learning rate rises.
    - beta2: decay of AdamW's second moment.
    - weight_decay: of matrices and embeddings, or of adapters.
    - z_loss: keeps logits small: factor of the squared logarithm of the softmax's denominator, often 1e-4.
    - label_smoothing: share of each target that is spread over the vocabulary.
    - context: tokens of a row.
    - seed: of the order of the rows.
    """

    forms = ("remat", "accumulate")
    identity: tuple[str, ...] = ("tokenizer", "alphabet", "tokenizer_digest")
    option_defaults: dict[str, Any]

    def __init__(
        self,
        *,
        vocab: int | None,
        optimizer: str,
        moments: str,
        lr: float,
        schedule: str,
        lr_end: float | None,
        warmup: float,
        beta2: float,
        weight_decay: float,
        z_loss: float,
        label_smoothing: float,
        **text: Any,
    ):
        """text: the arguments of TextRecipe."""
        super().__init__(**text)
        self._vocab = vocab
        self._optimizer, self._moments = optimizer, moments
        self._lr, self._lr_end = lr, lr / 10 if lr_end is None else lr_end
        self._warmup, self._beta2, self._weight_decay = warmup, beta2, weight_decay
        self._schedule, self._z_loss, self._label_smoothing = schedule, z_loss, label_smoothing
        for name, limits in LIMITS.items():
            if (value := getattr(self, f"_{name}")) is not None:
                check_number(value, name, **limits)
        if optimizer not in OPTIMIZERS:
            raise InputError(f"unknown optimizer {optimizer!r}; {did_you_mean(optimizer, OPTIMIZERS)}")
        if moments not in MOMENTS:
            raise InputError(f"unknown moments {moments!r}; {did_you_mean(moments, MOMENTS)}")
        if moments != "f32" and optimizer == "adafactor":
            raise InputError("adafactor has no first moment: leave --moments out")
        if schedule not in SCHEDULES:
            raise InputError(f"unknown schedule {schedule!r}; {did_you_mean(schedule, SCHEDULES)}")
        self.option_defaults = {
            "context": text["context"], "tokenizer": text["tokenizer"], "lr": self._lr, "lr_end": self._lr_end,
            "warmup": warmup, "beta2": beta2, "weight_decay": weight_decay, "held_out": DEFAULT_HELD_OUT_SHARE,
        }  # fmt: skip

    def options(self) -> dict[str, Any]:
        """Return every option that rebuilds this recipe, including the alphabet of its data."""
        options = {
            **self._shape_options(),
            **self._text_options(),
            "vocab": self.vocab,
            "optimizer": None if self._optimizer == "adamw" else self._optimizer,  # older runs do not have it
            "moments": None if self._moments == "f32" else self._moments,
            "lr": self._lr,
            "schedule": None if self._schedule == "cosine" else self._schedule,
            "lr_end": self._lr_end,
            "warmup": self._warmup,
            "beta2": self._beta2,
            "weight_decay": self._weight_decay,
            "z_loss": self._z_loss or None,
            "label_smoothing": self._label_smoothing or None,
        }
        return {name: value for name, value in options.items() if value is not None}

    def describe(self) -> dict[str, str]:
        """Describe the shape, the text and the schedule."""
        layers, width = self._layers_and_width()
        return {
            "model": f"{layers} layer{'s' * (layers > 1)}, width {width}, context {self._context}",
            "data": self._describe_data(),
            "learning rate": f"{self._lr:g} after a warm-up of {self._warmup:.0%}, {SCHEDULES[self._schedule]} "
            f"{self._lr_end:g}",
        }

    def _layers_and_width(self) -> tuple[int, int]:
        raise NotImplementedError

    def _shape_options(self) -> dict[str, Any]:
        """Return the options of the subclass."""
        raise NotImplementedError

    @cached_property
    def vocab(self) -> int:
        """The model's vocabulary."""
        needed = self._needed_vocab()
        vocab = self._vocab if self._vocab is not None else needed or FAKE_VOCAB_SIZE
        if needed > vocab:
            raise InputError(
                f"the tokenizer ({self._kind}) needs a vocabulary of {needed}, not {vocab}; use --vocab {needed}"
            )
        return vocab

    def _needed_vocab(self) -> int:
        return self.tokenizer.vocab if self.tokenizer else 0

    def optimizer(self) -> "Optimizer":
        """Return how parameters are updated."""
        from tpuswarm.recipes.language.program import Optimizer

        return Optimizer(
            self._optimizer, self._moments, self.schedule, self._beta2, self._weight_decay, self._z_loss,
            self._label_smoothing,
        )  # fmt: skip

    def schedule(self, progress: "jax.Array") -> "jax.Array":
        """Return the learning rate at a share of the run."""
        from tpuswarm.recipes.language.program import learning_rate

        return learning_rate(progress, self._schedule, self._lr, self._lr_end, self._warmup)

    def sample(
        self,
        state: Any,
        prompt: str,
        *,
        tokens: int,
        temperature: float,
        seed: int,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Sequence[str] = (),
    ) -> str:
        """Return a continuation of `prompt` up to one of the texts `stop`; an empty prompt starts from a line break."""
        from tpuswarm.recipes.language.sampling import make_sampling, text_of
        from tpuswarm.recipes.language.tokenizer import Bpe
        from tpuswarm.train.supervised_program import inference_params

        if self.tokenizer is None:
            raise InputError("a model trained on fake data cannot generate text")
        begin = self.tokenizer.begin_text if isinstance(self.tokenizer, Bpe) else ""
        start = self.tokenizer.encode(begin + prompt or "\n").tolist()
        sampling = make_sampling(temperature, top_k, top_p, repetition_penalty)
        chunks = self.generate(inference_params(state), start, tokens, sampling, seed)
        return "".join(text_of(chunks, self.tokenizer.decode, (), stop))

    def generate(
        self, params: Any, start: list[int], count: int, sampling: "Sampling", seed: int
    ) -> Iterator[list[int]]:
        """Yield `count` tokens after `start`, in chunks."""
        raise NotImplementedError
