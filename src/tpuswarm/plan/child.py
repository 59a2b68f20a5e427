"""python -m tpuswarm.plan.child: compiles one program for one described slice, in a process of its own.

Takes an order as one line of JSON on stdin, and answers in lines of JSON on stdout: `say` while it works, then `found`
with all it rests on, `refused` with a sentence about what was asked, or `failed` with one about what went wrong. It
ends when its parent does.
"""

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import Any, TextIO

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.plan.cache import Rests
from tpuswarm.plan.order import Order


def main() -> None:
    """Answer one order."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a recipe prints is no answer
    rests = Rests()
    order = Order.of(json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start = time.monotonic()

    def say(text: str) -> None:
        _answer(answers, say=text)

    try:
        from tpuswarm.plan.judge import judge
        from tpuswarm.train.process.platform import cache_folder

        found = judge(order, say)
    except InputError as error:
        _answer(answers, refused=str(error))
        return
    except RunFailed as error:
        _answer(answers, failed=str(error))
        return
    values = asdict(found) | {"seconds": round(time.monotonic() - start, 1)}
    _answer(answers, found=values, rests=rests.all(but=cache_folder(".")))


def _answer(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def _end_with_parent() -> None:
    sys.stdin.read()  # ends when the other side is closed
    os._exit(1)


if __name__ == "__main__":
    main()
