"""Compare a training step of a Llama of 10 million parameters with transformers on the same CPU. About 5 minutes.

transformers runs in child processes (`transformers_llama.py`), eager and with torch.compile, with the same shape,
batch, optimizer and clipping; the three take turns. They need `make oracle`'s `.venv-oracle`.
"""

import json
from pathlib import Path

import jax

from benchmarks.bare import compile_bare
from benchmarks.report import Settings, Skipped, Table, median
from benchmarks.torch_speed import OURS, Worker, steps_seconds
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.train.process.platform import local_devices

SHAPE = {
    "model_type": "llama", "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
ROWS, ROUND_COUNT, STEP_COUNT = 8, 9, 4


def run(settings: Settings) -> Table:
    rounds, steps = (2, 1) if settings.quick else (ROUND_COUNT, STEP_COUNT)
    local_devices()  # chooses JAX's platforms
    recipe = Decoder(architecture=json.dumps(SHAPE), data="fake")
    recipe.defaults = {**recipe.defaults, "batch": ROWS}
    bare = compile_bare(recipe, jax.devices("cpu")[:1])
    batch = bare.to_devices(recipe.data("train").rows(0, ROWS))
    script = Path(__file__).with_name("transformers_llama.py")
    peers = {
        f"transformers, {form}": Worker(script, form, json.dumps(SHAPE), str(ROWS)) for form in ("eager", "compile")
    }
    took: dict[str, list[float]] = {name: [] for name in (OURS, *(name for name, peer in peers.items() if peer.about))}
    for turn in range(-1, rounds):  # one round warms up
        for name, blocks in took.items():
            seconds = steps_seconds(bare, batch, steps) if name == OURS else peers[name].run(steps)
            if turn >= 0:
                blocks.append(seconds / steps * 1e3)
    closing = {name: peer.close() for name, peer in peers.items()}
    if len(took) == 1:
        raise Skipped(f"transformers does not work here: {closing['transformers, eager']}")
    count = sum(leaf.size for leaf in jax.tree.leaves(bare.compiled.program.exchange().get(bare.state)))
    rows = [(OURS, median(took[OURS]).show(".1f"), "1", f"{count:,}")]
    for name in took.keys() - {OURS}:
        ratio = median([theirs / ours for theirs, ours in zip(took[name], took[OURS], strict=True)])
        about = peers[name].about
        label = f"{name} ({about['transformers']}, torch {about['torch']}, {about['threads']} threads)"
        rows.append((label, median(took[name]).show(".1f"), ratio.show(".2f"), f"{about['parameters']:,}"))
    return Table(
        "A step of a Llama of 10 M parameters beside transformers, one CPU, float32",
        ("", "ms per step: median (95% interval)", "over ours, median of rounds", "parameters"),
        sorted(rows, key=lambda row: (row[0] != OURS, row[0])),
        [
            f"{rounds} rounds of {steps} steps each in turn; {ROWS} rows of 128 tokens; gradient, clipping, AdamW",
            *(f"{name} does not work here: {closing[name]}" for name in peers if name not in took),
        ],
    )
