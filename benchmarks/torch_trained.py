"""One module trained by torch and by tpuswarm with the same data, in turns, for `torch_modules.py`: NAME STEPS BLOCK.

Runs where torch is; prints one JSON object: the losses of both, and of torch from weights a rounding error apart, their
milliseconds a step, the costliest operation of each, as their own profilers have it.
"""

import copy
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch
import transformers
from torch import nn
from torch.nn import functional

from benchmarks.bare import usual
from tpuswarm import ArraySource, Recipe
from tpuswarm.torch import recipe
from tpuswarm.train.process.platform import local_devices

PROFILED = 5


class Residual(nn.Module):  # type: ignore[misc]  # no torch where types are checked
    """Two convolutions beside an identity."""

    def __init__(self, channels: int):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        """Of [B, C, H, W]."""
        return torch.relu(x + self.convs(x))


class Text(nn.Module):  # type: ignore[misc]  # no torch where types are checked
    """GPT-2 of transformers, from tokens to scores."""

    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=128, n_positions=64, n_layer=4, n_embd=128, n_head=4, use_cache=False, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip

    def forward(self, input: Any) -> Any:
        """Of [B, T]."""
        return self.model(input_ids=input).logits


def classes(outputs: Any, batch: Any) -> Any:
    """Cross entropy of the label."""
    return functional.cross_entropy(outputs, batch["label"])


def next_token(outputs: Any, batch: Any) -> Any:
    """Cross entropy of each next token."""
    return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["input"][:, 1:].flatten())


def perceptron() -> Any:
    """Three linear layers."""
    return nn.Sequential(nn.Linear(784, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))


def resnet() -> Any:
    """Convolutions with BatchNorm, at two sizes."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), Residual(32), nn.MaxPool2d(2), Residual(32), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def labelled(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Random rows, with classes that a random matrix decides."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(2048, *shape)).astype(np.float32)
    label = (rows.reshape(len(rows), -1) @ random.normal(size=(int(np.prod(shape)), 10))).argmax(-1)
    return {"input": rows, "label": label.astype(np.int32)}


def waves() -> dict[str, np.ndarray]:
    """Waves in noise; the class is their direction."""
    random = np.random.default_rng(0)
    label, phase = random.integers(0, 10, 2048), random.uniform(0, 2 * np.pi, (2048, 1, 1))
    angle = (label * np.pi / 10)[:, None, None]
    y, x = np.mgrid[:32, :32]
    wave = np.sin(1.2 * (x * np.cos(angle) + y * np.sin(angle)) + phase)
    rows = wave[:, None] + random.normal(size=(2048, 3, 32, 32))
    return {"input": rows.astype(np.float32), "label": label.astype(np.int32)}


def counting() -> dict[str, np.ndarray]:
    """Tokens that grow by a number of each row's own, modulo 128."""
    first, more = np.random.default_rng(0).integers(0, 128, (2, 2048, 1))
    return {"input": ((first + more % 7 * np.arange(64)) % 128).astype(np.int32)}


MODELS: dict[str, tuple[Callable[[], Any], Any, dict[str, np.ndarray], int, float]] = {
    "perceptron, 1.9 M": (perceptron, classes, labelled((784,)), 128, 0.05),
    "ResNet of 2 blocks, 32 x 32": (resnet, classes, waves(), 32, 0.01),
    "GPT-2 of transformers, 0.8 M": (Text, next_token, counting(), 16, 0.05),
}
"""Name → module, loss, data, batch, learning rate."""
ROUNDING = 1e-7
"""By how much of itself each weight differs where torch is compared with itself: an error of float32."""


def theirs(module: Any, loss: Any, rows: Iterator[dict[str, np.ndarray]], rate: float) -> Callable[[], float]:
    """A step in torch, as one writes it."""
    optimizer = torch.optim.SGD(module.train().parameters(), rate, momentum=0.9)

    def step() -> float:
        batch = {name: torch.from_numpy(np.array(each)) for name, each in next(rows).items()}
        batch = {name: each.long() if each.dtype == torch.int32 else each for name, each in batch.items()}
        found = loss(module(batch["input"]), batch)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        return float(found.detach())

    return step


def ours(made: Recipe, rows: Iterator[dict[str, np.ndarray]]) -> tuple[Callable[[], float], Any]:
    """The step that the trainer compiles, and that program."""
    bare = usual(made, jax.devices("cpu")[:1])
    return lambda: float(bare.step(bare.put(next(rows)))["loss"]), bare.compiled.step


def costliest_of_theirs(step: Callable[[], float]) -> str:
    """By torch's profiler: the operator with the most time of its own, and its share."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(PROFILED):
            step()
    found = {each.key: each.self_cpu_time_total for each in profile.key_averages()}
    name = max(found, key=lambda each: found[each])
    return f"{name.removeprefix('aten::')} {found[name] / sum(found.values()):.0%}"


def costliest_of_ours(step: Callable[[], float], compiled: Any) -> str:
    """By JAX's profiler: what the instructions of the compiled program took, by the operation that they are from."""
    text = compiled.as_text()
    of = dict(re.findall(r"%?([\w.-]+) = [^\n]*?metadata=\{[^}]*?op_name=\"([^\"]+)\"", text))
    took: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                step()
        data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in of:
                    took[_operation(of[event.name])] += event.duration_ns
    if not took:
        return "–"
    name, most = took.most_common(1)[0]
    return f"{name} {most / took.total():.0%}"


def _operation(name: str) -> str:
    """`dot_general`, forward or backward, of an instruction's name."""
    return f"{name.rpartition('/')[2]}{' (backward)' if 'transpose(' in name else ''}"


def main(name: str, steps: int, block: int) -> None:
    """Blocks of theirs, ours, theirs, …"""
    make, loss, data, batch, rate = MODELS[name]
    local_devices()  # chooses JAX's platforms
    torch.manual_seed(0)
    module = make()
    apart = copy.deepcopy(module)
    with torch.no_grad():
        for each in apart.parameters():
            each.mul_(1 + ROUNDING * torch.randn_like(each).sign())
    made = recipe(
        module, loss, data, optax.sgd(rate, momentum=0.9), defaults={"batch": batch, "steps": steps}
    )  # exported before torch trains it
    source = ArraySource(data, seed=0)

    def rows() -> Iterator[dict[str, np.ndarray]]:
        at = 0
        while True:
            yield source.rows(at, batch)
            at += batch

    mine, compiled = ours(made, rows())
    both = {"torch": theirs(module, loss, rows(), rate), "ours": mine}
    losses: dict[str, list[float]] = {each: [] for each in both}
    took: dict[str, list[float]] = {each: [] for each in both}
    for _ in range(steps // block):
        for each, step in both.items():
            start = time.perf_counter()
            losses[each] += [step() for _ in range(block)]
            took[each].append((time.perf_counter() - start) / block * 1e3)
    step = theirs(apart, loss, rows(), rate)
    losses["apart"] = [step() for _ in range(steps)]
    about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    costliest = {"torch": costliest_of_theirs(both["torch"]), "ours": costliest_of_ours(mine, compiled)}
    print(json.dumps({"losses": losses, "ms": took, "costliest": costliest, "about": about}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
