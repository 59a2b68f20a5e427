"""Run modules of ours on a host that has only Python 3.6 or later: send their source, install nothing."""

import json
from functools import cache
from importlib.resources import files

BOOTSTRAP = """\
import json, sys, types
for name, text in json.loads(sys.stdin.readline()):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules["{main}"].main()
"""


def bootstrap(main: str) -> str:
    """Return a program for `python3 -c`: it reads the modules of `pack_modules` and calls `main()` of one."""
    return BOOTSTRAP.format(main=main)


@cache
def pack_modules(*names: str) -> bytes:
    """Return one line with modules and their parents, in the order of their imports."""
    parents = sorted({name.rpartition(".")[0] for name in names} | {"tpuswarm"})
    modules = [(name, "") for name in parents]
    for name in names:
        package, _, module = name.rpartition(".")
        modules.append((name, files(package).joinpath(f"{module}.py").read_text(encoding="utf-8")))
    return json.dumps(modules).encode() + b"\n"
