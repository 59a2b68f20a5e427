"""The recipe of today's language models.

    tpuswarm train llama-tiny --data tinyshakespeare.txt
    tpuswarm train hf:Qwen/Qwen3-0.6B --data my-text/
    tpuswarm train hf:Qwen/Qwen3-0.6B --data my-text/ --lora 16

The first trains from scratch. The others go on from published weights, of any family that `architecture` reads; the
last trains adapters alone.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError
from tpuswarm.recipes.decoder import adapter_config
from tpuswarm.recipes.decoder import architecture as shapes
from tpuswarm.recipes.decoder.config import BASES, TARGETS, Config, Lora
from tpuswarm.recipes.language.hub import PREFIX, absolute_place, open_published
from tpuswarm.recipes.language.language_model import LanguageModel
from tpuswarm.train.recipe import Batch, Options
from tpuswarm.train.settings import differences

if TYPE_CHECKING:  # methods import JAX, so that a wrong option fails before it loads
    from tpuswarm.recipes.language.loss import LossOptions
    from tpuswarm.recipes.language.sampling import Sampling
    from tpuswarm.train.supervised_program import SupervisedProgram

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "mlp_width": 352, "context": 64, "lr": 2e-3},
    "300m": {"layers": 24, "width": 1024, "heads": 16, "kv_heads": 8, "mlp_width": 2816, "context": 2048, "lr": 6e-4},
}
"""Sizes of models that are trained from scratch, all in the family llama."""
FIELDS = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "mlp_width": "intermediate_size",
}  # fmt: skip
"""Our options → the fields of a config.json."""
MAX_DEFAULT_CONTEXT = 2048
TUNING_LR = 2e-5
"""Peak learning rate on published weights, as in Touvron et al. 2023 (Llama 2), section 3.1."""
LORA_LR = 2e-4
"""Peak learning rate of adapters, as in Hu et al. 2022 (LoRA), table 12, and Dettmers et al. 2023 (QLoRA), table 9."""


class Decoder(LanguageModel):
    """A language model, trained on text: a Llama from scratch, or a published model.

    - size: tiny or 300m, of a model that is trained from scratch; it gives the defaults.
    - architecture: instead of a size, a published model (hf:ORG/NAME, hf:DIR) or the content of its config.json.
    - layers, width, heads, mlp_width: of a model that is trained from scratch.
    - kv_heads: heads with keys and values of their own, which divide --heads.
    - context: tokens of a row, at most those that the model was made for.
    - lora: rank of the adapters (LoRA), which are trained instead of a published model's own parameters.
    - lora_alpha: alpha / rank is the factor of the adapters' outputs; by default the rank, for a factor of 1.
    - lora_dropout: share of the adapters' inputs that is dropped in training.
    - rslora: true divides alpha by the square root of the rank instead (rsLoRA).
    - lora_targets: layers with adapters, such as q_proj,v_proj; by default all linear layers of the blocks.
    - lora_base: the published model that the adapters belong to; by default that of the architecture.
    - base: dtype of the parameters that are not trained, with --lora: bf16, f32, or int8 for the linear layers.
    """

    identity = (
        *LanguageModel.identity,
        "architecture",
        "lora",
        "lora_alpha",
        "lora_targets",
        "lora_base",
        "base",
        "rslora",
    )
    target = "tpuswarm.recipes.decoder.recipe:Decoder"
    takes_conversations = True

    def __init__(
        self,
        *,
        size: str | None = None,
        architecture: str | None = None,
        data: str | list[str] | None = None,
        json_field: str | None = None,
        separator: str | None = None,
        held_out: float | None = None,
        tokenizer: str | None = None,
        alphabet: str | None = None,
        tokenizer_digest: str | None = None,
        layers: int | None = None,
        width: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        mlp_width: int | None = None,
        context: int | None = None,
        lora: int | None = None,
        lora_alpha: float | None = None,
        lora_dropout: float | None = None,
        rslora: bool | None = None,
        lora_targets: str | None = None,
        lora_base: str | None = None,
        base: str | None = None,
        vocab: int | None = None,
        optimizer: str = "adamw",
        moments: str = "f32",
        lr: float | None = None,
        schedule: str = "cosine",
        lr_end: float | None = None,
        warmup: float | None = None,
        beta2: float | None = None,
        weight_decay: float | None = None,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        seed: int = 0,
    ):
        given = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "mlp_width": mlp_width}
        given = {name: value for name, value in given.items() if value is not None}
        self._lora = _adapters(lora, lora_alpha, lora_dropout, rslora, lora_targets, base, lora_base)
        if self._lora and architecture is None:
            raise InputError(
                "--lora adapts a published model: train hf:ORG/NAME or hf:DIR; of a run, `tpuswarm export` makes one"
            )
        if lora_base is None and self._lora and str(architecture).startswith(PREFIX):
            lora_base = architecture
        self.base_model = absolute_place(lora_base) if lora_base else None
        if architecture is not None:
            if given:
                name = next(iter(given)).replace("_", "-")
                raise InputError(
                    f"--{name} shapes a model that is trained from scratch; a published model has its own shape"
                )
            published = open_published(architecture) if architecture.startswith(PREFIX) else None
            if published and (found := adapter_config.read_options(published)):
                their_base = found.get("lora_base", "")
                raise InputError(
                    f"{architecture} has adapters of {their_base or 'a model without a name'}: train "
                    f"{their_base or f'{PREFIX}ORG/NAME or {PREFIX}DIR, their model,'} --init-from {architecture}"
                )
            tokenizer = tokenizer or (architecture if published else None)
            self._facts = shapes.facts_of(published) if published else _parsed(architecture)
            self.name = str(self._facts.get("model_type"))
            self._shape = shapes.parse_config(self._facts, architecture if published else self.name)
            default_context, is_tiny = min(self._shape.context, MAX_DEFAULT_CONTEXT), False
            default_lr = LORA_LR if lora else TUNING_LR
            vocab = self._shape.vocab if vocab is None else vocab
            size = None
        else:
            size = size or "tiny"
            if size not in SIZES:
                raise InputError(f"unknown size {size!r}; {did_you_mean(size, SIZES)}")
            self.name = f"llama-{size}"
            values = {name: SIZES[size][name] for name in FIELDS} | given
            for name, value in values.items():
                check_number(value, name, least=1)
            default_context, default_lr, is_tiny = SIZES[size]["context"], SIZES[size]["lr"], size == "tiny"
            self._facts = {
                "model_type": "llama", **{FIELDS[name]: value for name, value in values.items()},
                "max_position_embeddings": context or default_context, "tie_word_embeddings": True,
                "rms_norm_eps": 1e-5,
            }  # fmt: skip
            self._shape = shapes.parse_config(self._facts, self.name)
        self._size, self._has_own_tokenizer = size, tokenizer is not None and tokenizer == architecture
        super().__init__(
            data=data,
            json_field=json_field,
            separator=separator,
            held_out=held_out,
            tokenizer=tokenizer or ("characters" if is_tiny else "bpe"),
            has_default_tokenizer=False,
            alphabet=alphabet,
            tokenizer_digest=tokenizer_digest,
            vocab=vocab,
            bpe_vocab=vocab or (4096 if is_tiny else 32_768),
            context=default_context if context is None else context,
            optimizer=optimizer,
            moments=moments,
            lr=default_lr if lr is None else lr,
            schedule=schedule,
            lr_end=lr_end,
            warmup=0.05 if warmup is None else warmup,
            beta2=(0.99 if is_tiny else 0.95) if beta2 is None else beta2,
            weight_decay=(0.0 if lora else 0.1) if weight_decay is None else weight_decay,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            seed=seed,
        )
        if self._context > self._shape.context:
            raise InputError(
                f"{self.name} has a context of {self._shape.context}, not {self._context}: lower --context"
            )
        if size:
            self.option_defaults |= {name: self._facts[field] for name, field in FIELDS.items()}
        self.defaults = {
            "batch": 12 if is_tiny else 32,
            "steps": 2_000 if is_tiny else 20_000 if size else 1_000,
            "clip": 1.0,
            "decay": r"/lora_[ab]$" if lora else r"(^embed|^head|/w)$",
            "outer": "average" if is_tiny else "nesterov",
        }

    def _shape_options(self) -> dict[str, Any]:
        if self._lora:
            options = {
                "architecture": json.dumps(self._facts), "lora": self._lora.rank, "lora_alpha": self._lora.alpha,
                "lora_targets": ",".join(self._lora.targets), "base": self._lora.base,
                "lora_dropout": self._lora.dropout or None, "rslora": self._lora.by_root or None,
                "lora_base": self.base_model,
            }  # fmt: skip
            return {name: value for name, value in options.items() if value is not None}
        if self._size:
            return {"size": self._size, **{name: self._facts[field] for name, field in FIELDS.items()}}
        return {"architecture": json.dumps(self._facts)}

    def _layers_and_width(self) -> tuple[int, int]:
        return len(self._shape.layers), self._shape.width

    def _needed_vocab(self) -> int:
        if self._has_own_tokenizer:
            return self._shape.vocab  # without a download; options_at compares
        return super()._needed_vocab()

    @cached_property
    def config(self) -> Config:
        """The model's shape in this run."""
        return replace(self._shape, vocab=self.vocab, context=self._context, lora=self._lora)

    def describe(self) -> dict[str, str]:
        """Describe the shape, the adapters, the text and the schedule."""
        words = super().describe()
        if self._lora:
            words["model"] += f", adapters of rank {self._lora.rank} on {', '.join(self._lora.targets)}"
        return words

    def program(self, options: Options) -> "SupervisedProgram":
        """Return the program; it supports every option."""
        import jax

        from tpuswarm.recipes.decoder import lora, model
        from tpuswarm.recipes.language.loss import mean_by_set
        from tpuswarm.recipes.language.program import language_program

        def init(key: Any) -> Any:
            return model.init(key, self.config)

        def loss(params: Any, batch: Batch, key: Any, how: "LossOptions") -> Any:
            tokens_BxT1, counted_BxT = batch["tokens"], batch.get("counted")
            if self._lora and self._lora.dropout and key is not None:
                params = lora.with_keys(params, key, self._lora)
            x_BxTxD = model.hidden(params, tokens_BxT1[:, :-1], self.config, options, batch.get("segments"))
            mean = partial(model.mean_loss, x_BxTxD, params, tokens_BxT1[:, 1:], self.config, how)
            if key is not None or not self.set_names:
                return mean(counted_BxT)
            counted_BxT = tokens_BxT1[:, 1:] >= 0 if counted_BxT is None else counted_BxT
            return mean_by_set(mean, counted_BxT, batch["set"], self.set_names)

        tied = {"embed": "head"} if self.config.tied else {}
        base = lora.base_paths(jax.eval_shape(init, jax.random.key(0))) if self._lora else ()
        return language_program(
            init, loss, self._context, options, self.optimizer(), tied, base, self._is_chat, self.set_names
        )

    def generate(
        self, params: Any, start: list[int], count: int, sampling: "Sampling", seed: int
    ) -> Iterator[list[int]]:
        """Yield `count` tokens after `start`, in chunks."""
        from tpuswarm.recipes.decoder.sample import generate

        return generate(params, start, count, sampling, seed, self.config, Options())

    @classmethod
    def options_at(cls, place: str) -> dict[str, Any]:
        """Return the options for a published model: its architecture, and its tokenizer if it has one.

        Of adapters: those of their base, and their form.
        """
        published = open_published(place)  # before JAX loads
        if adapters := adapter_config.read_options(published):
            return (cls.options_at(adapters["lora_base"]) if "lora_base" in adapters else {}) | adapters
        from tpuswarm.recipes.language.published_tokenizer import read_tokenizer
        from tpuswarm.recipes.language.tokenizer import Characters

        vocab = shapes.parse_config(shapes.facts_of(published), place).vocab
        theirs = read_tokenizer(published)
        if theirs and theirs.vocab > vocab:
            raise InputError(
                f"the tokenizer of {place} does not match its weights: it has {theirs.vocab} tokens, they have "
                f"{vocab}; restore the original, or remove the tokens that were added"
            )
        if isinstance(theirs, Characters):
            return {"architecture": place, "tokenizer": theirs.kind, "alphabet": theirs.alphabet}
        return {"architecture": place} | ({"tokenizer": place} if theirs else {})

    def load_shared(self, place: str, like: Any) -> Any:
        """Read the weights of a published model of this shape, or of adapters and their base."""
        if self._lora is None:
            return self._load_whole(place, like)
        import jax

        from tpuswarm.recipes.decoder import lora, weights
        from tpuswarm.train.paths import overlay

        published = open_published(place)
        base, adapters = lora.split(like)
        theirs = adapter_config.read_options(published)
        if theirs is None:
            if self.base_model not in (None, absolute_place(place)):
                raise InputError(f"these are adapters of {self.base_model}: to adapt {place}, train {place} --lora")
            adapters = lora.fresh(jax.random.key(self._seed), like, self._lora)
        else:
            base_place = self._base_of(theirs, place)
            options = self._shape_options() | {"rslora": self._lora.by_root}
            ours = {name: options.get(name) for name in theirs}
            if different := differences(theirs | {"lora_base": absolute_place(base_place)}, ours):
                raise InputError(f"the adapters of {place} do not fit this recipe: {'; '.join(different)}")
            adapters = weights.load_adapters(published, self.config, self._lora, adapters)
            place = base_place
        return overlay(adapters, self._load_whole(place, base))

    def _base_of(self, adapters: dict[str, Any], place: str) -> str:
        """Return the model that adapters belong to: the one they name, or this recipe's."""
        base = adapters.get("lora_base", self.base_model)
        if base is None:
            raise InputError(f"the adapters of {place} do not name their model: train it with --init-from {place}")
        return str(base)

    def _load_whole(self, place: str, like: Any) -> Any:
        from tpuswarm.recipes.decoder import weights
        from tpuswarm.recipes.language.published_tokenizer import read_tokenizer

        published = open_published(place)
        theirs = shapes.parse_config(shapes.facts_of(published), place)
        if theirs.vocab != self.vocab:
            raise InputError(
                f"{place} has a vocabulary of {theirs.vocab}, this recipe of {self.vocab}: leave out --tokenizer and "
                "--vocab"
            )
        if replace(theirs, context=self._context, lora=self._lora) != self.config:
            raise InputError(f"{place} is another model than this recipe's; train {place} itself")
        tokenizer = read_tokenizer(published) if self.tokenizer else None
        if tokenizer and self.tokenizer and tokenizer.key != self.tokenizer.key:
            raise InputError(
                f"the weights of {place} belong to another tokenizer ({tokenizer.vocab} tokens) than this one "
                f"({self.tokenizer.kind}, {self.tokenizer.vocab} tokens); leave out --tokenizer"
            )
        return weights.load(published, theirs, like)

    def shared_digest(self, place: str) -> str:
        """Return the SHA-256 of the weights; of adapters, theirs and their base's.

        Not the hub's commit: that changes with a model's README, and members of a swarm may join weeks later.
        """
        from tpuswarm.recipes.decoder.weights import ADAPTER_FILE
        from tpuswarm.recipes.language.weight_files import digest

        published = open_published(place)
        if adapters := adapter_config.read_options(published):
            return f"{digest(published, [ADAPTER_FILE])} on {self.shared_digest(self._base_of(adapters, place))}"
        return digest(published)

    def export(self, state: Any, folder: Path) -> None:
        """Write model.safetensors, config.json and the tokenizer for transformers; adapters alone for peft."""
        from tpuswarm.recipes.decoder import export, lora
        from tpuswarm.train.supervised_program import inference_params

        params = inference_params(state)
        if self._lora is None:
            export.write(params, self.config, self._facts, self.tokenizer, folder, self.chat_template)
            return
        if self.base_model is None:
            raise InputError("nothing says which model the adapters belong to; use --merge")
        if shapes.is_text_part(self._facts):
            raise InputError(f"peft cannot add adapters to the text part alone of {self.base_model}; use --merge")
        lora.write(params, self.config, self._lora, self.base_model, folder)
        export.write_tokenizer(self.tokenizer, self.config, folder, self.chat_template)

    def export_merged(self, state: Any, folder: Path) -> None:
        """Write the model for transformers with its adapters added to its weights."""
        from tpuswarm.recipes.decoder import export
        from tpuswarm.train.supervised_program import inference_params

        if self._lora is None:
            raise InputError("a model that was trained without --lora has no adapters: leave --merge out")
        export.write(inference_params(state), self.config, self._facts, self.tokenizer, folder, self.chat_template)


def _adapters(
    rank: int | None, alpha: float | None, dropout: float | None, by_root: bool | None, targets: str | None,
    base: str | None, model: str | None,
) -> Lora | None:  # fmt: skip
    """Return the adapters that the options describe. Raises InputError for impossible ones."""
    if rank is None:
        given = {
            "lora-alpha": alpha, "lora-dropout": dropout, "rslora": by_root, "lora-targets": targets,
            "lora-base": model, "base": base,
        }  # fmt: skip
        if needless := next((name for name, value in given.items() if value is not None), None):
            raise InputError(f"--{needless} needs --lora")
        return None
    check_number(rank, "lora", least=1)
    if alpha is not None:
        check_number(alpha, "lora_alpha", above=0)
    check_number(dropout or 0.0, "lora_dropout", least=0, below=1)
    names = [*TARGETS] if targets is None else [name.strip() for name in targets.split(",")]
    if (unknown := next((name for name in names if name not in TARGETS), None)) is not None:
        raise InputError(
            f"lora_targets names {unknown!r}, which is not a linear layer; {did_you_mean(unknown, TARGETS)}"
        )
    if base not in (None, *BASES):
        raise InputError(f"unknown base {base!r}; {did_you_mean(str(base), BASES)}")
    return Lora(
        rank,
        float(rank if alpha is None else alpha),
        tuple(name for name in TARGETS if name in names),
        next(known for known in BASES if known == (base or "bf16")),
        dropout or 0.0,
        bool(by_root),
    )


def _parsed(text: str) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except ValueError as error:
        raise InputError(f"architecture is the content of a config.json, not {text[:40]!r}: {error}") from error
    if not isinstance(facts, dict):
        raise InputError(f"architecture is the content of a config.json, not {text[:40]!r}")
    return facts
