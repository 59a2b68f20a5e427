"""Export a well-known module without its weights, for `torch_plan.py`: NAME FILE. Runs where transformers is."""

import sys
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional

import tpuswarm

TOKENS = 2048
PICTURE = {"pixels": np.zeros((1, 3, 224, 224), np.float32), "label": np.zeros(1, np.int32)}


class Pictures(torch.nn.Module):  # type: ignore[misc]  # no torch where types are checked
    """From pixels to the scores of classes."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, pixels: Any) -> Any:
        """Of [B, 3, 224, 224]."""
        return self.model(pixel_values=pixels).logits


class Text(torch.nn.Module):  # type: ignore[misc]  # no torch where types are checked
    """From tokens to the scores of the next ones."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, ids: Any) -> Any:
        """Of [B, T]."""
        return self.model(input_ids=ids).logits


def classes(outputs: Any, batch: Any) -> Any:
    """Cross entropy of the label."""
    return functional.cross_entropy(outputs, batch["label"])


def next_token(outputs: Any, batch: Any) -> Any:
    """Cross entropy of each next token."""
    return functional.cross_entropy(outputs[:, :-1].flatten(0, 1).float(), batch["ids"][:, 1:].flatten())


def resnet50() -> Any:
    """ResNet-50: transformers' usual configuration of ResNet."""
    config = transformers.ResNetConfig(num_labels=1000)
    return Pictures(transformers.ResNetForImageClassification(config)), classes, PICTURE


def vit_b() -> Any:
    """ViT-B/16 for pictures of 224: transformers' usual configuration of ViT."""
    config = transformers.ViTConfig(num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return Pictures(transformers.ViTForImageClassification(config)), classes, PICTURE


def llama_1b() -> Any:
    """The sizes of Llama 3.2 1B."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=TOKENS, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return Text(transformers.LlamaForCausalLM(config)), next_token, {"ids": np.zeros((1, TOKENS), np.int32)}


MODULES = {"resnet50": resnet50, "vit_b": vit_b, "llama_1b": llama_1b}

if __name__ == "__main__":
    name, path = sys.argv[1:]
    with torch.device("meta"):
        module, loss, row = MODULES[name]()
    tpuswarm.torch.save(module, loss, row, path)
    print(sum(each.numel() for each in module.parameters()))
