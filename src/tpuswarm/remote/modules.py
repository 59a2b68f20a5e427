"""Modules of ours that run on a host with its own Python (3.6 or later) and nothing else: sent there, not installed."""

import json
from functools import cache
from importlib.resources import files

BOOT = """\
import json, sys, types
for name, text in json.loads(sys.stdin.readline()):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules["{main}"].main()
"""


def boot(main: str) -> str:
    """What the host's Python is given with -c: it reads a line of `sent`, and calls `main()` of one of the modules."""
    return BOOT.format(main=main)


@cache
def sent(*names: str) -> bytes:
    """Modules by the names that they know each other by, those that are imported first: one line."""
    parents = sorted({name.rpartition(".")[0] for name in names} | {"tpuswarm"})
    found = [(name, "") for name in parents]
    for name in names:
        package, _, module = name.rpartition(".")
        found.append((name, files(package).joinpath(f"{module}.py").read_text(encoding="utf-8")))
    return json.dumps(found).encode() + b"\n"
