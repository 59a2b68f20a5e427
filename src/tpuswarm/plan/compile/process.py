"""python -m tpuswarm.plan.compile.process: compile one program for one slice.

Reads a request as a line of JSON from stdin, and writes lines of JSON to stdout: `progress` while it works, then
`result` with its dependencies, `refused` for wrong input, or `failed`. It ends with its parent.
"""

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import Any, TextIO

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.plan.compile.cache import DependencyTracker
from tpuswarm.plan.compile.request import CompileRequest


def main() -> None:
    """Carry out one request."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a recipe may print
    dependencies = DependencyTracker()
    request = CompileRequest.from_json(json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start = time.monotonic()

    def report(text: str) -> None:
        _answer(answers, progress=text)

    try:
        from tpuswarm.plan.compile.fit import check_fit
        from tpuswarm.train.process.platform import cache_folder

        result = check_fit(request, report)
    except InputError as error:
        _answer(answers, refused=str(error))
        return
    except RunFailed as error:
        _answer(answers, failed=str(error))
        return
    values = asdict(result) | {"seconds": round(time.monotonic() - start, 1)}
    _answer(answers, result=values, dependencies=dependencies.stamps(without=cache_folder(".")))


def _answer(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def _end_with_parent() -> None:
    sys.stdin.read()  # returns when the parent closes it
    os._exit(1)


if __name__ == "__main__":
    main()
