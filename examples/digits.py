"""A small convolutional network reads scikit-learn's handwritten digits (`pip install scikit-learn`).

python examples/digits.py  # seen: 5 s of CPU time, 99.6% of 256 held-out pictures read correctly
tpuswarm train examples/digits.py:recipe --batch 128 --decay '/w$' --eval-every 50
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from tpuswarm import Trainer, supervised


def rows(split):
    pictures, labels = load_digits(return_X_y=True)
    pictures, labels = pictures.reshape(-1, 8, 8, 1).astype(np.float32) / 16, labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    part = {"train": order[:1_500], "validation": order[1_500:]}[split]
    return {"picture": pictures[part], "label": labels[part]}


def init(key, width):
    one, two, three = jax.random.split(key, 3)
    he = jax.nn.initializers.he_normal()
    return {
        "conv1": {"w": he(one, (3, 3, 1, width)), "b": jnp.zeros(width)},
        "conv2": {"w": he(two, (3, 3, width, 2 * width)), "b": jnp.zeros(2 * width)},
        "out": {"w": he(three, (8 * width, 10)), "b": jnp.zeros(10)},
    }


def conv(layer, x_BxHxWxC):
    """3 x 3, then the largest of each 2 x 2."""
    y_BxHxWxD = jax.lax.conv_general_dilated(
        x_BxHxWxC, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    b, h, w, d = y_BxHxWxD.shape
    return jax.nn.relu(y_BxHxWxD + layer["b"]).reshape(b, h // 2, 2, w // 2, 2, d).max((2, 4))


def loss(params, batch, key):
    x_BxHxWxC = conv(params["conv2"], conv(params["conv1"], batch["picture"]))
    logits_BxK = (x_BxHxWxC.reshape(len(x_BxHxWxC), -1) @ params["out"]["w"] + params["out"]["b"]).astype(jnp.float32)
    error = optax.softmax_cross_entropy_with_integer_labels(logits_BxK, batch["label"]).mean()
    return error, {"accuracy": (logits_BxK.argmax(-1) == batch["label"]).mean()}


def recipe(width: int = 32, lr: float = 3e-3):
    adam = lambda rate, decay_mask: optax.adamw(rate, weight_decay=1e-2, mask=decay_mask)
    schedule = lambda progress: lr * (1 - progress)
    usual = {"steps": 400, "batch": 64}
    return supervised(lambda key: init(key, width), loss, adam, rows, schedule, usual, cast="picture")


if __name__ == "__main__":
    print(f"read correctly: {Trainer().fit(recipe()).metrics['eval_accuracy']:.1%} of the held-out pictures")
