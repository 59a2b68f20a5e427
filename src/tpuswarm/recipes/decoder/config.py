"""The shape of a decoder-only language model, for every family that is supported."""

from dataclasses import dataclass
from typing import Literal, get_args

from tpuswarm.recipes.language.config import TILE_SIZE

TARGETS = {
    "q_proj": ("attention", "q"), "k_proj": ("attention", "k"), "v_proj": ("attention", "v"),
    "o_proj": ("attention", "out"),
    "gate_proj": ("mlp", "gate"), "up_proj": ("mlp", "up"), "down_proj": ("mlp", "down"),
}  # fmt: skip
"""Linear layers of a block by transformers' names → their places in our parameters."""
LORA_LEAVES = ("lora_a", "lora_b")
"""Parameters of an adapter, beside w of its layer: float32[layers, inputs, rank] and [layers, rank, outputs]."""
DROPOUT_KEY = "dropout_key"
"""Beside them in training with dropout: a key of each layer."""
SCALE = "w_scale"
"""Beside an int8 w: float32[layers, outputs], by which its columns are multiplied."""
Base = Literal["bf16", "int8", "f32"]
BASES: tuple[Base, ...] = get_args(Base)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (Su et al. 2021).

    Each angle is its frequency times the position; cosines and sines are multiplied by `scale`.
    """

    frequencies: tuple[float, ...]
    """float[K / 2], in radians per token; all 0 for a layer without positions."""
    scale: float = 1.0


@dataclass(frozen=True)
class Layer:
    """How one layer attends."""

    rotary: int = 0
    """Index into `Config.rotaries`."""
    window: int | None = None
    """A token attends to so many tokens, itself included; None: to all before it."""


@dataclass(frozen=True)
class Lora:
    """Adapters of linear layers, over a base that is not trained."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(TARGETS)
    base: Base = "bf16"
    """Dtype of the base's parameters; int8: of its linear layers, the others are bf16."""
    dropout: float = 0.0
    """Share of the adapters' inputs that is dropped in training."""
    by_root: bool = False
    """Whether the factor is alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023)."""

    @property
    def factor(self) -> float:
        return self.alpha / (self.rank**0.5 if self.by_root else self.rank)


@dataclass(frozen=True)
class Config:
    """Shape of one decoder. A run may use a smaller context than the model's."""

    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    """Divides `heads`: so many heads share a key and a value (Ainslie et al. 2023)."""
    head_width: int
    vocab: int
    context: int
    layers: tuple[Layer, ...]
    rotaries: tuple[Rotary, ...]
    norm_epsilon: float
    attention_scale: float
    """Factor of the scores before the softmax."""
    activation: Literal["silu", "gelu"] = "silu"
    """Activation of the MLP's gate; `gelu` is the tanh approximation."""
    norm_inputs: bool = True
    """Whether attention and MLP normalize their inputs."""
    norm_outputs: bool = False
    """Whether they normalize their outputs."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + scale, so that scales start at 0."""
    norm_heads: Literal["none", "each", "all"] = "none"
    """Whether queries and keys are normalized, over each head or over all heads."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of attention's output."""
    mlp_bias: bool = False
    tied: bool = True
    """Whether the embedding is the output head too."""
    embedding_scale: float = 1.0
    score_cap: float | None = None
    """Scores s become cap tanh(s / cap)."""
    logit_cap: float | None = None
    deviation: float = 0.02
    """Standard deviation of the initial parameters."""
    lora: Lora | None = None

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // TILE_SIZE) * TILE_SIZE

    @property
    def is_plain(self) -> bool:
        """Whether kernels compute its attention: every layer sees the whole context, and scores have no cap."""
        return self.score_cap is None and all(
            layer.window is None or layer.window >= self.context for layer in self.layers
        )
