"""Kill -9 before every single effect of an apply and of a remove, also inside the writing of a file.

Run on the router of `lab.py` with two files.
Prints a line for each kill: the effect, whether the rules were old or new then, and whether a remove undid everything.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tpuswarm.errors import InputError
from tpuswarm.router import apply as act
from tpuswarm.router import machine
from tpuswarm.router.settings import LIMITS, UNIT
from tpuswarm.train.process.atomic import part

EFFECTS = ((machine, "write_record"), (machine, "write"), (machine, "load"), (machine, "delete"), (os, "fsync"))
FILES = tuple(path for file in (machine.RECORD, Path(UNIT), Path(LIMITS)) for path in (file, part(file)))


def in_child(work: Callable[[], None], kill_at: int | None = None) -> str | None:
    """Do it in a process that kills itself before its effect of number `kill_at`; its name, None if it never came."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        count = iter(range(1_000))

        def wrap(module: ModuleType, name: str) -> Callable[..., object]:
            effect = getattr(module, name)

            def wrapped(*words: object) -> object:
                if next(count) == kill_at:
                    os.write(writer, " ".join([name, *map(str, words)]).splitlines()[0][:70].encode())
                    os.kill(os.getpid(), signal.SIGKILL)
                return effect(*words)

            return wrapped

        for module, name in EFFECTS:
            setattr(module, name, wrap(module, name))
        work()
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    said = os.read(reader, 100).decode()
    os.close(reader)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if said else 0), said
    return said or None


def apply(file: str, tune: bool) -> None:
    act.apply(act.prepare(Path(file), tune, persist=tune, root=True))


def remove() -> None:
    try:
        act.remove(act.prepare_removal())
    except InputError as error:
        assert "nothing is applied" in str(error)


def main() -> None:
    old_file, new_file = sys.argv[1:]
    paths = [path for path, _, _ in act.prepare(Path(new_file), tune=True, persist=True, root=True).plan.changes]

    def rules() -> str:
        return subprocess.run(["nft", "-s", "list", "ruleset"], capture_output=True, text=True, check=True).stdout

    def settings() -> list[str | None]:
        return [machine.read(path) for path in paths]

    def files() -> list[Path]:
        return [file for file in FILES if file.exists()]

    nothing = rules(), settings(), files()
    apply(new_file, tune=True)
    new = rules()
    remove()
    assert (rules(), settings(), files()) == nothing
    for number in range(1_000):
        apply(old_file, tune=False)
        old = rules()
        died = in_child(lambda: apply(new_file, tune=True), number)
        state = {old: "old", new: "new"}.get(rules(), "half")
        remove()
        print(f"apply, before {died}: {state} rules, undone: {(rules(), settings(), files()) == nothing}")
        if died is None:
            break
    for number in range(1_000):
        apply(new_file, tune=True)
        died = in_child(remove, number)
        state = {new: "old", nothing[0]: "new"}.get(rules(), "half")
        remove()
        print(f"remove, before {died}: {state} rules, undone: {(rules(), settings(), files()) == nothing}")
        if died is None:
            break


main()
