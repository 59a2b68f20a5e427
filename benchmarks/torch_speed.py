"""Compare steps with torch on the same CPU: gpt2-tiny, and PyTorch modules of transformers. About 15 minutes.

torch runs in child processes with the same shapes, batch, optimizer and clipping (`torch_model.py`), eager and with
torch.compile. The three take turns, block by block. The first run installs torch in `.venv-oracle` (1 GB). The modules
(`torch_module.py`) need the transformers of `make oracle`; the seconds of one core count for them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.bare import Bare, compile_bare
from benchmarks.report import Settings, Skipped, Table, median
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.process.platform import local_devices

ROUND_COUNT, STEP_COUNT = 15, 200
ROOT = Path(__file__).resolve().parents[1]
ORACLE_FOLDER = ROOT / ".venv-oracle"
PACKAGES = ("torch==2.13.0", "numpy")
OURS = "tpuswarm"
FORMS = (OURS, "eager", "compile")
MODULE_ROUNDS, MODULE_STEPS = 15, {"ResNet-18": 5, "GPT-2": 20, "Llama": 20}


class Worker:
    """A child process in `.venv-oracle` that runs steps. about: empty if it failed."""

    def __init__(self, *arguments: str | Path):
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the child
        self._child = subprocess.Popen(
            [torch_python("cpu"), *arguments], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        assert self._child.stdin and self._child.stdout
        self._stdin, self._stdout = self._child.stdin, self._child.stdout
        self.about: dict[str, Any] = json.loads(self._stdout.readline() or "{}")

    def run(self, steps: int) -> float:
        """Return the seconds of a block of steps."""
        self._stdin.write(f"{steps}\n")
        self._stdin.flush()
        return float(self._stdout.readline())

    def close(self) -> str:
        """End the child; return its last line on stderr."""
        self._child.communicate()
        with self._errors as errors:
            errors.seek(0)
            return errors.read().strip().rpartition("\n")[2]


def run(settings: Settings) -> Iterator[Table]:
    yield _compare_gpt2(settings)
    yield _compare_modules(settings)


def _compare_gpt2(settings: Settings) -> Table:
    rounds, steps = (3, 10) if settings.quick else (ROUND_COUNT, STEP_COUNT)
    local_devices()  # chooses JAX's platforms
    recipe = GPT2(size="tiny", data="fake")  # 65 characters, like tinyshakespeare
    bare = compile_bare(recipe, jax.devices("cpu")[:1])
    config, rows_a_step = recipe.config, int(recipe.defaults["batch"])
    shape = {name: getattr(config, name) for name in ("layers", "heads", "width", "context")}
    shape |= {"vocab": config.padded_vocab, "batch": rows_a_step}
    batch = bare.to_devices(recipe.data("train").rows(0, rows_a_step))
    script = Path(__file__).with_name("torch_model.py")
    torches = {f"torch, {form}": Worker(script, form, json.dumps(shape)) for form in ("eager", "compile")}
    working = {name: torch for name, torch in torches.items() if torch.about}
    took: dict[str, list[float]] = {name: [] for name in (OURS, *working)}
    for turn in range(-1, rounds):  # one round warms up
        for name, blocks in took.items():
            seconds = working[name].run(steps) if name in working else steps_seconds(bare, batch, steps)
            if turn >= 0:
                blocks.append(seconds / steps * 1e3)
    closing = {name: torch.close() for name, torch in torches.items()}
    count = sum(leaf.size for leaf in jax.tree.leaves(bare.compiled.program.exchange().get(bare.state)))
    rows = [(OURS, median(took[OURS]).show(".2f"), "1", f"{count:,}")]
    for name, torch in working.items():
        ratio = median([theirs / ours for theirs, ours in zip(took[name], took[OURS], strict=True)])
        about = torch.about
        label = f"{name} ({about['torch']}, {about['threads']} threads)"
        rows.append((label, median(took[name]).show(".2f"), ratio.show(".2f"), f"{about['parameters']:,}"))
    return Table(
        "A step of gpt2-tiny beside torch, one CPU, float32",
        ("", "ms per step: median (95% interval)", "over ours, median of rounds", "parameters"),
        rows,
        [
            f"{rounds} rounds of {steps} steps each in turn; {shape}; gradient, clipping, AdamW; one batch, no feed",
            *(f"{name} does not work here: {closing[name]}" for name in torches if name not in working),
        ],
    )


def _compare_modules(settings: Settings) -> Table:
    rounds, rows = 2 if settings.quick else MODULE_ROUNDS, []
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # inherited by the workers
    try:
        for name, steps in MODULE_STEPS.items():
            workers = {form: Worker("-m", "benchmarks.torch_module", form, name) for form in FORMS}
            took: dict[str, list[float]] = {form: [] for form, worker in workers.items() if worker.about}
            for turn in range(-1, rounds):  # one round warms up
                for form, blocks in took.items():
                    seconds = workers[form].run(steps)
                    if turn >= 0:
                        blocks.append(seconds / steps * 1e3)
            for form, worker in workers.items():
                about, closing = worker.about, worker.close()
                if form not in took:
                    rows.append((name, form, f"does not work here: {closing}", "", ""))
                    continue
                ratio = median([theirs / ours for theirs, ours in zip(took[form], took[OURS], strict=True)])
                making = f"{about['making']:.1f}" if "making" in about else ""
                label = f"{name}, {about['parameters']:,} parameters"
                rows.append((label, form, median(took[form]).show(".1f"), ratio.show(".2f"), making))
    finally:
        os.sched_setaffinity(0, cores)
    return Table(
        "A step of PyTorch modules beside torch, one core, float32",
        ("", "", "ms of a core per step: median (95% interval)", "over ours", "making and checking the recipe, s"),
        rows,
        [f"{rounds} rounds of {MODULE_STEPS} steps in turn; 16 rows of 64 tokens, or 16 pictures of 32 x 32; SGD"],
    )


def steps_seconds(bare: Bare, batch: Any, steps: int) -> float:
    """Return the seconds of a block of our steps."""
    start = time.perf_counter()
    for _ in range(steps):
        bare.step(batch)
    jax.block_until_ready(bare.state)
    return time.perf_counter() - start


def torch_python(device: str) -> Path:
    """Return a Python with a torch for the device: for CUDA this one if possible, else `.venv-oracle`'s.

    Creates `.venv-oracle` if it is missing. Raises Skipped if its packages cannot be installed or do not see the GPU.
    """
    python, version = ORACLE_FOLDER / "bin" / "python", PACKAGES[0].partition("==")[2]
    check = f"import torch; assert torch.__version__.startswith('{version}')"
    if device == "cuda":
        check = "import torch; assert torch.cuda.is_available()"
        if _runs(Path(sys.executable), check):
            return Path(sys.executable)
    if _runs(python, check):
        return python
    print(f"making {ORACLE_FOLDER.name} with {', '.join(PACKAGES)} …", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", ORACLE_FOLDER], check=True)
    pip = subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], stdout=sys.stderr)
    if pip.returncode:
        raise Skipped(f"{PACKAGES[0]} could not be installed in {ORACLE_FOLDER.name}")
    if not _runs(python, check):
        raise Skipped(
            f"the torch in {ORACLE_FOLDER.name} sees no GPU: remove it, or install a torch for CUDA beside tpuswarm"
        )
    return python


def _runs(python: Path, program: str) -> bool:
    return python.exists() and subprocess.run([python, "-c", program], capture_output=True).returncode == 0
