"""python -m benchmarks [NAME…] [--quick] [--data PATH] [--device-size SIZE]: benchmarks as tables in markdown."""

import argparse
import importlib
import math
import os
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.report import Settings, Skipped, Table, machine

NAMES = (
    "startup",
    "feed",
    "overhead",
    "diagnostics",
    "torch_speed",
    "torch_modules",
    "shakespeare",
    "compile_124m",
    "goodput",
    "soak",
    "stall",
    "quality",
    "ladder",
    "stylegan2",
    "scale",
    "resume",
    "merge",
    "traffic",
    "bucket",
    "head",
    "router",
    "rehearsal",
    "journey",
    "notebook",
    "page",
    "remote",
    "plan",
    "torch_plan",
    "calibration",
    "gpu",
    "gpu_changes",
    "stylegan2_gpu",
    "shakespeare_gpu",
)
READ_DATA = ("shakespeare", "shakespeare_gpu", "quality", "ladder")
DATA = Path("../shared/data/tinyshakespeare.txt")


def main() -> None:
    """Run the named benchmarks, or all, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all without any")
    parser.add_argument("--quick", action="store_true", help="tiny counts: does it run at all?")
    parser.add_argument("--data", type=Path, default=DATA, help=f"tinyshakespeare's text (default: {DATA})")
    parser.add_argument("--device-size", choices=("small", "35m"), default="small", help="of the models of quality")
    parser.add_argument("--hours", type=float, default=math.inf, help="after which ladder begins no other run")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in NAMES]:
        parser.error(f"there is no benchmark {unknown[0]}; there are {', '.join(NAMES)}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's processes find our modules compiled
    print(machine(), flush=True)
    for name in asked.names or NAMES:
        command = ["python", "-m", "benchmarks", name, *(["--quick"] if asked.quick else [])]
        command += ["--data", str(asked.data)] if name in READ_DATA and asked.data != DATA else []
        command += ["--device-size", asked.device_size] if name == "quality" and asked.device_size != "small" else []
        print(f"{name} …", file=sys.stderr)
        start = time.perf_counter()
        quick = " (quick: these figures mean nothing)" if asked.quick else ""
        settings = Settings(asked.quick, asked.data, asked.device_size, asked.hours)
        try:
            made: Table | Iterable[Table] = importlib.import_module(f"benchmarks.{name}").run(settings)
            for table in [made] if isinstance(made, Table) else made:
                print(f"\n### {table.title}{quick}\n\n{table.markdown()}", flush=True)
        except Skipped as reason:
            print(f"\n### {name}\n\nskipped: {reason}")
        print(f"\n`{shlex.join(command)}`, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
