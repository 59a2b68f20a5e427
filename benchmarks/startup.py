"""How long a person waits: `tpuswarm --help`, and the demo until its first step. About 1 minute.

Limits: 0.3 s and 15 s. The first step is there when runs/demo/metrics.jsonl has its first row; the demo is then ended
with SIGTERM. Cold: no token file and nothing in the compilation cache; warm: the same demo again.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Settings, Table, median, verdict

PROGRAM = str(Path(sys.executable).with_name("tpuswarm"))
HELPS, DEMOS = 10, 3
HELP_LIMIT, DEMO_LIMIT = 0.3, 15.0
PATIENCE = 120.0


def run(settings: Settings) -> Table:
    """Every command as a person would start it, in a folder of its own."""
    helps, demos = (2, 1) if settings.quick else (HELPS, DEMOS)
    plain = median([_seconds([sys.executable, "-c", "pass"]) for _ in range(helps)])
    shown = median([_seconds([PROGRAM, "--help"]) for _ in range(helps)])
    cold, warm = [], []
    for _ in range(demos):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(first_step(Path(folder)))
            warm.append(first_step(Path(folder)))
    rows = [
        ("python -c pass", plain.show(".3f"), "", ""),
        ("tpuswarm --help", shown.show(".3f"), f"at most {HELP_LIMIT}", verdict(shown.middle <= HELP_LIMIT)),
    ]
    for name, found in (("cold", median(cold)), ("warm", median(warm))):
        limit = (f"at most {DEMO_LIMIT:.0f}", verdict(found.middle <= DEMO_LIMIT))
        rows.append((f"tpuswarm demo to its first step, {name}", found.show(".2f"), *limit))
    return Table(
        "Start-up",
        ("", "seconds: median (interval)", "limit", ""),
        rows,
        [f"{helps} starts of each of the first two, 95% interval; {demos} of the demo, cold and warm, range"],
    )


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def first_step(folder: Path) -> float:
    """Seconds from the start of `tpuswarm demo` in `folder` to its first row; the demo is ended then."""
    metrics = folder / "runs" / "demo" / "metrics.jsonl"
    metrics.unlink(missing_ok=True)  # of the demo before, which the new one removes in its own time
    environment = os.environ | {"TPUSWARM_CACHE": str(folder / "cache")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    start = time.perf_counter()
    with (folder / "output.txt").open("w") as output:
        demo = subprocess.Popen([PROGRAM, "demo"], cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if demo.poll() is not None or time.perf_counter() - start > PATIENCE:
                    raise RuntimeError(f"the demo made no step: {(folder / 'output.txt').read_text()[-500:]}")
                time.sleep(0.01)
            return time.perf_counter() - start
        finally:
            demo.terminate()
            demo.wait(PATIENCE)
