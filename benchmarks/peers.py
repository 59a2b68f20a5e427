"""Compare a training step with transformers on the same CPU, and with MaxText in the TPU compiler.

transformers trains a Llama of 10 million parameters in child processes (`transformers_llama.py`), eager and with
torch.compile, with the same shape, batch, optimizer and clipping; the three take turns, some 5 minutes. They need
`make oracle`'s `.venv-oracle`. MaxText compiles Qwen3 0.6B for described slices (`tpu_step.py`), and so do we, in its
interpreter: 8 compilations of 1 to 2 minutes of a core. Fresh processes load a model of SmolLM2 135M's shape and
generate (`first_token.py`), half a minute.

    uv venv --python 3.12 .peers/maxtext
    uv pip install --python .peers/maxtext 'maxtext[tpu]==0.2.5' tomli-w
"""

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax

from benchmarks.bare import compile_bare
from benchmarks.report import Settings, Skipped, Table, median
from benchmarks.torch_speed import OURS, ROOT, Worker, steps_seconds, torch_python
from tpuswarm.catalog import public_models
from tpuswarm.config.units import GIB
from tpuswarm.recipes.decoder import export, model
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.train.process.platform import local_devices

SHAPE = {
    "model_type": "llama", "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
ROWS, ROUND_COUNT, STEP_COUNT = 8, 9, 4
MAXTEXT_PYTHON = ROOT / ".peers" / "maxtext" / "bin" / "python"
LOADED_MODEL = "smollm2-135m"
MODEL, CONTEXT = "qwen3-0.6b", 2048
SLICES = ("v5e-16", "v6e-16")
ROWS_PER_DEVICE = (2, 4)


def run(settings: Settings) -> Iterator[Table]:
    yield _compare_with_transformers(settings)
    yield _compare_first_tokens(settings)
    if not MAXTEXT_PYTHON.exists():
        raise Skipped(
            f"there is no {MAXTEXT_PYTHON.relative_to(ROOT)}; benchmarks/peers.py says how to install MaxText"
        )
    yield _compare_with_maxtext(settings)


def _compare_first_tokens(settings: Settings) -> Table:
    """Generate with random weights; a second process of ours finds the first one's programs in the cache."""
    script, rounds = Path(__file__).with_name("first_token.py"), 1 if settings.quick else 3
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}", "JAX_PLATFORMS": "cpu"}
    forms = {OURS: "tpuswarm", f"{OURS}, compiled before": "tpuswarm", "transformers": "transformers"}
    took: dict[str, list[dict[str, float]]] = {name: [] for name in forms}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        folder.mkdir()
        facts = dict(public_models()[LOADED_MODEL].config)
        recipe = Decoder(architecture=json.dumps(facts), data="fake")
        params = jax.jit(partial(model.init, config=recipe.config))(jax.random.key(0))
        export.write(params, recipe.config, facts, None, folder)
        for turn in range(rounds):
            environment["JAX_COMPILATION_CACHE_DIR"] = f"{place}/cache-{turn}"
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            for name, form in forms.items():
                command = [str(torch_python("cpu")), str(script), form, str(folder)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise Skipped(f"{script.name} {form} does not work here: {done.stderr[-300:]}")
                took[name].append(json.loads(done.stdout.splitlines()[-1]))
    parts = ("import", "load", "first", "each")
    rows = []
    for name, found in took.items():
        medians = [statistics.median(times[part] for times in found) for part in parts]
        rows.append(
            (name, f"{sum(medians[:3]):.1f}", *(f"{each:.2f}" for each in medians[:3]), f"{1 / medians[3]:.1f}")
        )
    return Table(
        f"From a process's start to its first token: {LOADED_MODEL}, float32, one CPU, a prompt of 64 tokens",
        ("", "seconds", "imports", "weights", "first token", "then tokens/s"), rows,
        [f"medians of {rounds} processes each in turn; greedy; files in the system's cache"],
    )  # fmt: skip


def _compare_with_maxtext(settings: Settings) -> Table:
    rows = []
    for slice_name in SLICES[:1] if settings.quick else SLICES:
        for count in ROWS_PER_DEVICE[:1] if settings.quick else ROWS_PER_DEVICE:
            for name, form in (("MaxText 0.2.5", "maxtext"), (OURS, "full")):
                found = _compile(form, slice_name, count)
                gib = [found[part] / GIB for part in ("arguments", "temporaries")]
                rows.append(
                    (f"{slice_name}, {count} rows a device", name, *(f"{size:.2f}" for size in (*gib, sum(gib))),
                     f"{found['sent'] / 1e9:.2f}", f"{found['seconds']:.0f}")
                )  # fmt: skip
    return Table(
        f"A step of {MODEL} in the TPU compiler of MaxText's packages, {CONTEXT:,} tokens a row, layers recomputed",
        ("", "", "arguments, GiB", "temporaries", "a device", "GB sent by a device", "seconds to compile"),
        rows,
        ["sent: from the compiler's HLO, each collective counted as a ring over all devices"],
    )


def _compile(form: str, slice_name: str, rows: int) -> dict[str, float]:
    # Without this process's own choice of a libtpu.
    environment = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
    environment |= {
        "PYTHONPATH": f"{ROOT / 'src'}", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }  # fmt: skip
    script = Path(__file__).with_name("tpu_step.py")
    done = subprocess.run(
        [MAXTEXT_PYTHON, script, form, MODEL, slice_name, str(rows), str(CONTEXT)], env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{script.name} {form} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _compare_with_transformers(settings: Settings) -> Table:
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
