"""A small transformer in Flax NNX, with dropout, learns to sort eight digits (`pip install flax`).

python examples/flax_nnx.py  # seen: 15 s of CPU time, 97.8% of the held-out rows without a mistake
tpuswarm train examples/flax_nnx.py:recipe --width 512 --lr 5e-4 --shard fsdp --freeze embed
"""

import jax
import numpy as np
import optax
from flax import nnx

from tpuswarm import Trainer, supervised


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)  # without rngs: its key comes with the call

    def __call__(self, x, key):
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))), deterministic=key is None, rngs=key)


class Sorter(nnx.Module):
    def __init__(self, width, layers, rngs):
        self.embed, self.place = (nnx.Param(rngs.params.normal((count, width))) for count in (10, 8))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, digits, key):
        x = self.embed[digits] + self.place[None]
        for number, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, number))
        return self.head(self.norm(x)).astype(np.float32)


def rows(split):
    count = {"train": 20_000, "validation": 2_000}[split]
    digits = np.random.default_rng(count).integers(0, 10, (count, 8), dtype=np.int32)
    return {"digits": digits, "sorted": np.sort(digits)}


def recipe(width: int = 64, layers: int = 2, lr: float = 2e-3):
    def split(key):
        return nnx.split(Sorter(width, layers, nnx.Rngs(key)), nnx.Param)  # refuses state that is no parameter

    def loss(params, batch, key):
        logits = nnx.merge(structure, params)(batch["digits"], key)
        error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["sorted"]).mean()
        return error, {"right": (logits.argmax(-1) == batch["sorted"]).all(-1).mean()}

    structure, _ = nnx.eval_shape(lambda: split(0))  # shapes only: nothing is computed
    return supervised(lambda key: nnx.to_pure_dict(split(key)[1]), loss, optax.adamw(lr), rows, defaults={"steps": 600})


if __name__ == "__main__":
    print(f"sorted without a mistake: {Trainer().fit(recipe()).metrics['eval_right']:.1%} of the held-out rows")
