"""Choices of language models."""

from typing import Literal

TILE_SIZE = 128
"""A TPU's matrix unit works on tiles of 128; the vocabulary is padded to a multiple."""

Kind = Literal["characters", "bytes", "bpe"]
"""Kinds of tokenizers."""

DEFAULT_HELD_OUT_SHARE = 0.1
"""Share of the tokens that is held out, as in nanoGPT."""
SCHEDULES = {
    "cosine": "then a cosine to", "linear": "then linear to", "wsd": "then constant, in the last fifth linear to",
}  # fmt: skip
"""Forms of the learning rate after the warm-up, and their descriptions."""
DECAY_SHARE = 0.2
"""Share of the run, at its end, in which `wsd` lowers the learning rate (Hägele et al. 2024: 10 to 20%)."""
OPTIMIZERS = ("adamw", "muon", "adafactor")
MOMENTS = ("f32", "bf16")
"""Dtypes of the first moment. The second stays float32: in fewer bits its updates round to nothing."""
