"""Find the line of a process's log that says why it died."""

import re
from pathlib import Path

TAIL_BYTES = 65536
MAX_CHARS = 300
FATAL = re.compile(r"F\d{4} [\d:.]+ +\d+ \S+\] (.*)")
"""The fatal error of a C++ library that logs with Abseil, such as XLA."""
STACK = re.compile(r"$|\s|@|\*\*\*|PC: @|(Current t|T)hread 0x|Stack \(|Extension modules:|\[\d{4}-\d\d-\d\d ")
"""Lines of stack traces, and those of Ray."""
ERROR = re.compile(r"Fatal Python error|[\w.]+(Error|Exception)\b|terminate called|.*(double free|corrupt|smashing)")


def fatal_line(log: Path, start: int) -> str:
    """Return the error with which a log ends after `start` bytes; empty if it ends with something else."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    if fatal := [found[1] for line in lines if (found := FATAL.match(line))]:
        return fatal[-1][:MAX_CHARS]
    last = next((line for line in reversed(lines) if not STACK.match(line)), "")
    return last[:MAX_CHARS] if ERROR.match(last) else ""


def names_cause(error: str) -> bool:
    """Whether an error says more than that the process died, so that the same one twice has the same cause."""
    return error != "" and not error.startswith(("Fatal Python error", "terminate called"))
