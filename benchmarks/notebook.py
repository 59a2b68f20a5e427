"""Compare a warm notebook cell on a slice of two workers with the same cell on one machine's kernel.

Limit: 60 ms more. Cells run in turn on both, through the whole path: websocket, SSH tunnel, Jupyter Server, kernel,
engines, all on one computer.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Settings, Table, median, verdict
from tpuswarm.cloud.rehearsal.connect import FOLDER_VARIABLE

if TYPE_CHECKING:
    from tests.remote.cells import Cells

PROGRAM = str(Path(sys.executable).with_name("tpuswarm"))
MAX_EXTRA_MS = 60.0
POOL = """
[[pool]]
name = "{name}"
type = "{type}"
zones = ["us-central2-b"]
count = 1
network = "tpuswarm-bench"
how = "on-demand"
"""
FILE = f"""\
name = "bench"
provider = "rehearsal"

[storage]
bucket = "rehearsal-bench"
region = "us-central2"

[setup]
notebook = true
{POOL.format(name="one", type="v4-8")}{POOL.format(name="slice", type="v4-16")}"""
ARRAY = """\
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
count = jax.device_count()
rows = NamedSharding(jax.make_mesh((count,), ("x",)), P("x"))
ones = jax.make_array_from_callback((count,), rows, lambda at: jnp.ones(count)[at])
total = jax.jit(jnp.sum)
"""
CELLS = {"`1 + 1`": "1 + 1", "`print(total(ones))`, over all devices": "print(total(ones))"}


def run(settings: Settings) -> Iterable[Table]:
    times = 5 if settings.quick else 100
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "swarm.toml").write_text(FILE)
        environment = {**os.environ, FOLDER_VARIABLE: f"{name}/cloud", "XDG_STATE_HOME": f"{name}/state", "HOME": name}

        def command(*words: str, check: bool = True) -> None:
            subprocess.run([PROGRAM, *words], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=check)

        try:
            for words in ("rehearsal start --speed 300", "init --yes", "up --yes --paid"):
                command(*words.split())
            with ExitStack() as stack:
                kernels = [
                    stack.enter_context(_kernel(folder, environment, f"v4-usc2b-{number}", 8890 + number))
                    for number in range(2)
                ]
                yield _table(kernels[0], kernels[1], times)
        finally:
            command("down", "--yes", check=False)
            command("rehearsal", "stop", check=False)


@contextmanager
def _kernel(folder: Path, environment: dict[str, str], name: str, port: int) -> "Iterator[Cells]":
    from tests.remote.cells import Server

    words = [PROGRAM, "notebook", name, "--port", str(port)]
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = ""
    try:
        while not re.search("Ctrl-C disconnects", output):
            output += process.stdout.readline()
        cells = Server(output).kernel()
        cells.run(ARRAY)
        yield cells
    finally:
        process.terminate()
        process.wait()


def _table(one: "Cells", slice_: "Cells", times: int) -> Table:
    rows = []
    for what, code in CELLS.items():
        for cells in (one, slice_):
            cells.run(code)
        took = [[cells.run(code).seconds * 1000 for cells in (one, slice_)] for _ in range(times)]
        extra = median([both - alone for alone, both in took])
        medians = (median(list(times_ms)).show(".1f") for times_ms in zip(*took, strict=True))
        rows.append((what, *medians, extra.show(".1f"), verdict(extra.middle < MAX_EXTRA_MS)))
    return Table(
        "A cell of a notebook",
        ("cell", "one kernel, ms", "a slice of 2 workers, ms", "more, ms", f"limit: {MAX_EXTRA_MS:g} ms"),
        rows,
        [f"Medians of {times}, each cell in turn on both, warm; 4 virtual CPU devices for each worker."],
    )
