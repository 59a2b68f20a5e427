"""python -m benchmarks [NAME…] [--quick] [--data PATH] [--peers PATH]: print benchmarks as tables in markdown."""

import argparse
import importlib
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
    "torch_speed",
    "peers",
    "shakespeare",
    "goodput",
    "soak",
    "stall",
    "quality",
    "scale",
    "coordinator",
    "merge",
    "traffic",
    "network",
    "bucket",
    "head",
    "carriers",
    "router",
    "rehearsal",
    "keeper",
    "journey",
    "notebook",
    "page",
    "remote",
    "plan",
    "models",
    "calibration",
    "gpu_all",
    "gpu_sizes",
    "gpu_decoder",
    "sentences",
)
READ_DATA = ("shakespeare", "quality")
DEFAULT_DATA, DEFAULT_PEERS = Path("../shared/data/tinyshakespeare.txt"), Settings.peers


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; default: all but models")
    parser.add_argument("--quick", action="store_true", help="tiny counts, to see that it runs")
    parser.add_argument(
        "--data", type=Path, default=DEFAULT_DATA, help=f"tinyshakespeare's text (default: {DEFAULT_DATA})"
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=DEFAULT_PEERS,
        help=f"clones that gpu_all and gpu_sizes compare with (default: {DEFAULT_PEERS})",
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in NAMES]:
        parser.error(f"there is no benchmark {unknown[0]}; there are {', '.join(NAMES)}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as for users, whose modules are compiled
    print(machine(), flush=True)
    for name in arguments.names or [name for name in NAMES if name != "models"]:  # days
        command = ["python", "-m", "benchmarks", name, *(["--quick"] if arguments.quick else [])]
        if name in READ_DATA and arguments.data != DEFAULT_DATA:
            command += ["--data", str(arguments.data)]
        if name.startswith("gpu_") and arguments.peers != DEFAULT_PEERS:
            command += ["--peers", str(arguments.peers)]
        print(f"{name} …", file=sys.stderr)
        start = time.perf_counter()
        quick = " (quick: these figures mean nothing)" if arguments.quick else ""
        settings = Settings(arguments.quick, arguments.data, arguments.peers)
        try:
            tables: Table | Iterable[Table] = importlib.import_module(f"benchmarks.{name}").run(settings)
            for table in [tables] if isinstance(tables, Table) else tables:
                print(f"\n### {table.title}{quick}\n\n{table.markdown()}", flush=True)
        except Skipped as reason:
            print(f"\n### {name}\n\nskipped: {reason}")
        print(f"\n`{shlex.join(command)}`, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
