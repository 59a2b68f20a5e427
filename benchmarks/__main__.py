"""python -m benchmarks [NAME…] [--quick] [--data PATH]: run benchmarks, print their tables as markdown."""

import argparse
import importlib
import shlex
import sys
import time
from pathlib import Path

from benchmarks.report import Settings, Skipped, Table, machine

NAMES = ("startup", "feed", "memory", "overhead", "torch_speed", "shakespeare", "compile_124m")
DATA = Path("../shared/data/tinyshakespeare.txt")


def main() -> None:
    """Run the named benchmarks, or all, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all without any")
    parser.add_argument("--quick", action="store_true", help="tiny counts: does it run at all?")
    parser.add_argument("--data", type=Path, default=DATA, help=f"tinyshakespeare's text (default: {DATA})")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in NAMES]:
        parser.error(f"there is no benchmark {unknown[0]}; there are {', '.join(NAMES)}")
    print(machine(), flush=True)
    for name in asked.names or NAMES:
        command = ["python", "-m", "benchmarks", name, *(["--quick"] if asked.quick else [])]
        command += ["--data", str(asked.data)] if name == "shakespeare" and asked.data != DATA else []
        print(f"{name} …", file=sys.stderr)
        start = time.perf_counter()
        try:
            table: Table = importlib.import_module(f"benchmarks.{name}").run(Settings(asked.quick, asked.data))
            title, text = table.title, table.markdown()
        except Skipped as reason:
            title, text = name, f"skipped: {reason}"
        quick = " (quick: these figures mean nothing)" if asked.quick else ""
        print(
            f"\n### {title}{quick}\n\n{text}\n\n`{shlex.join(command)}`, {time.perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
