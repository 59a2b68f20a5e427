"""GPT-2 written a second time, in NumPy float64, one row and one head after the other: the tests' oracle."""

from typing import Any

import numpy as np


def norm(x: np.ndarray, p: Any) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * p["scale"] + p["bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def logits(params: Any, tokens: np.ndarray, heads: int, vocab: int) -> np.ndarray:
    """Logits (rows, tokens, vocab) of stacked parameters."""
    found = []
    for row in tokens:
        x = params["wte"][row] + params["wpe"][: len(row)]
        for layer in range(len(params["blocks"]["ln_1"]["scale"])):
            p = take(params["blocks"], layer)
            h = norm(x, p["ln_1"]) @ p["attn"]["qkv"]["w"] + p["attn"]["qkv"]["b"]
            q, k, v = np.split(h, 3, axis=-1)
            mixed = []
            for head in range(heads):
                size = q.shape[-1] // heads
                part = slice(head * size, (head + 1) * size)
                scores = q[:, part] @ k[:, part].T / np.sqrt(size)
                scores[np.triu_indices(len(row), 1)] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
            x = x + np.concatenate(mixed, -1) @ p["attn"]["proj"]["w"] + p["attn"]["proj"]["b"]
            h = gelu(norm(x, p["ln_2"]) @ p["mlp"]["fc"]["w"] + p["mlp"]["fc"]["b"])
            x = x + h @ p["mlp"]["proj"]["w"] + p["mlp"]["proj"]["b"]
        found.append(norm(x, params["ln_f"]) @ params["wte"][:vocab].T)
    return np.stack(found)


def take(tree: Any, layer: int) -> Any:
    return {k: take(v, layer) for k, v in tree.items()} if isinstance(tree, dict) else tree[layer]


def mean_loss(logits: np.ndarray, targets: np.ndarray) -> float:
    logits = logits - logits.max(-1, keepdims=True)
    log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(-np.take_along_axis(log_probability, targets[..., None], -1).mean())
