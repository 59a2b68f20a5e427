"""Train a module of transformers on a CPU by tpuswarm or by torch, as a worker of `torch_speed.py`.

python -m benchmarks.torch_module tpuswarm|eager|compile NAME
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import torch
import transformers
from torch.nn import functional

import tpuswarm
from benchmarks.bare import compile_bare
from tpuswarm.train.process.platform import local_devices
from tpuswarm.train.recipe import Options

VOCAB, CONTEXT, CLASSES = 128, 64, 10
TEXT = {"vocab_size": VOCAB, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


class Logits(torch.nn.Module):  # type: ignore[misc]  # types are checked without torch
    """A model of transformers from its input, `pixel_values` or `input_ids`, to its logits."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input: Any) -> Any:
        return self.model(input).logits


def _resnet18() -> Any:
    config = transformers.ResNetConfig(
        layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], num_labels=CLASSES
    )
    return transformers.ResNetForImageClassification(config)


def _gpt2() -> Any:
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": CONTEXT}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **TEXT, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def _llama() -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        **TEXT,
    )
    return transformers.LlamaForCausalLM(config)


def _label_loss(outputs: Any, batch: Any) -> Any:
    return functional.cross_entropy(outputs, batch["label"])


def _next_token_loss(outputs: Any, batch: Any) -> Any:
    return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["input"][:, 1:].flatten())


RANDOM = np.random.default_rng(0)
PICTURES = {
    "input": RANDOM.normal(size=(16, 3, 32, 32)).astype(np.float32),
    "label": RANDOM.integers(0, CLASSES, 16).astype(np.int32),
}
TOKENS = {"input": RANDOM.integers(0, VOCAB, (16, CONTEXT)).astype(np.int32)}
MODULES: dict[str, tuple[Callable[[], Any], Callable[..., Any], dict[str, np.ndarray]]] = {
    "ResNet-18": (_resnet18, _label_loss, PICTURES),
    "GPT-2": (_gpt2, _next_token_loss, TOKENS),
    "Llama": (_llama, _next_token_loss, TOKENS),
}


def _step_of_tpuswarm(module: Any, loss: Any, rows: Any) -> tuple[Callable[[int], None], float]:
    """Return a function that runs steps, and the seconds of a core that making and checking the recipe took."""
    local_devices()  # chooses JAX's platforms
    start = time.process_time()
    defaults = {"batch": len(rows["input"]), "steps": 1000}
    recipe = tpuswarm.torch.recipe(module, loss, rows, optax.sgd(1e-3, momentum=0.9), defaults=defaults)
    recipe.program(Options())  # compares the module with torch
    seconds = time.process_time() - start
    bare = compile_bare(recipe, jax.devices("cpu")[:1])
    batch = bare.to_devices(rows)

    def run(steps: int) -> None:
        for _ in range(steps):
            bare.step(batch)
        jax.block_until_ready(bare.state)

    return run, seconds


def _step_of_torch(module: Any, loss: Any, rows: Any, is_compiled: bool) -> Callable[[int], None]:
    batch = {name: torch.from_numpy(array) for name, array in rows.items()}
    batch = {name: array.long() if array.dtype == torch.int32 else array for name, array in batch.items()}
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9)

    def loss_of_batch() -> Any:
        return loss(module(batch["input"]), batch)

    loss_of = torch.compile(loss_of_batch) if is_compiled else loss_of_batch

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of().backward()
            optimizer.step()

    return run


def main(form: str, name: str) -> None:
    """Serve blocks of steps on one batch; each answer is the seconds of a core that a block took."""
    make, loss, rows = MODULES[name]
    torch.manual_seed(0)
    module, about = make(), {"torch": torch.__version__, "threads": torch.get_num_threads()}
    module = Logits(module)
    about["parameters"] = sum(param.numel() for param in module.parameters())
    if form == "tpuswarm":
        run, about["making"] = _step_of_tpuswarm(module, loss, rows)
    else:
        run = _step_of_torch(module, loss, rows, form == "compile")
    run(1)  # compiles
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        start = time.process_time()
        run(int(line))
        print(time.process_time() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
