"""The sizes of GPT-2."""

from dataclasses import dataclass

from tpuswarm.recipes.language.config import TILE_SIZE


@dataclass(frozen=True)
class Config:
    """Shape of one GPT-2. Source: Radford et al. 2019, section 2.3, and the released configurations."""

    layers: int
    heads: int
    width: int
    context: int
    vocab: int
    dropout: float = 0.0

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // TILE_SIZE) * TILE_SIZE

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SIZES: dict[str, tuple[int, int, int, int]] = {
    "tiny": (4, 4, 128, 64),
    "124m": (12, 12, 768, 1024),
    "355m": (24, 16, 1024, 1024),
    "774m": (36, 20, 1280, 1024),
    "1558m": (48, 25, 1600, 1024),
}
"""Size → layers, heads, width, context."""

GPT2_VOCAB_SIZE = 50257
