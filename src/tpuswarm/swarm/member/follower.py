"""What host 0 of a member of several hosts tells the others; and the process of another host, which follows it.

`python -m tpuswarm.swarm.member.follower` is a process of its own because a host that loses another one has to end
(train/hosts/line.py); supervision/join.py keeps one, and reads its exit status and the lines on its stderr.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax
from pydantic import TypeAdapter

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.swarm.member import data_files as files
from tpuswarm.swarm.member.group import STEPPED, Group
from tpuswarm.swarm.member.lead import follow
from tpuswarm.swarm.member.program import make_ready
from tpuswarm.swarm.processes.plan import Plan
from tpuswarm.train.hosts.line import ABSENT, FAILED, LEFT, LOST, WRONG
from tpuswarm.train.hosts.rendezvous import Absent, Hosts
from tpuswarm.train.process import platform
from tpuswarm.train.recipe import Metrics

_PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)


def tell(hosts: Hosts, plan: Plan, data: Path, batch: int | None) -> None:
    """At host 0: all that another host needs to make the same program; data: the folder of the run's files."""
    if hosts.count > 1:
        hosts.send({"plan": _PLAN.dump_python(plan, mode="json"), "batch": batch})
        files.give(hosts, data, plan.files)


def obey(hosts: Hosts, say: Callable[[str], None]) -> None:
    """At every other host: make the program, and do what host 0 does until it says farewell."""
    message = hosts.receive()
    if message is None:
        return
    plan = _PLAN.validate_python(message[0]["plan"])
    flag = "--xla_gpu_deterministic_ops"  # JAX has started, so that it is too late to set it here
    if (
        plan.settings["deterministic"]
        and jax.default_backend() == "gpu"
        and flag not in os.environ.get("XLA_FLAGS", "")
    ):
        raise InputError(f"the run is --deterministic: set XLA_FLAGS={flag}=true on this host and join again")
    folder = files.folder_of(plan)
    files.take(hosts, folder, plan.files)
    ready = make_ready(plan, folder, jax.devices(), False, _Steps().took, say, message[0]["batch"])
    hosts.agree(ready.facts())
    platform.make_way()
    follow(hosts, ready.holder, ready.begin)


class _Steps:
    """Says on stderr when the first step was made."""

    dispatched = 0

    def took(self, number: int, metrics: Metrics) -> None:
        self.dispatched += 1
        if self.dispatched == 3:  # a holder waits for the step before its newest
            sys.stderr.write(f"{STEPPED}\n")
            sys.stderr.flush()


def main() -> NoReturn:
    """The process; its parent holds the other end of its stdin."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    screen = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries of JAX chat there

    def say(text: str) -> None:
        screen.write(f"{text}\n")

    group = Group.here()
    assert group is not None
    try:
        hosts = group.gather()
    except Absent as error:
        _end(ABSENT, str(error))
    except InputError as error:
        _end(WRONG, str(error))
    except Exception as error:  # noqa: BLE001  # whatever it is, it will be the same at the next try
        traceback.print_exc()
        _end(FAILED, f"host {group.index} could not start: {_words(error)}")
    say(f"host {group.index} of {group.count} is connected to host 0")
    try:
        with hosts:
            obey(hosts, say)
    except TpuswarmError as error:
        _end(WRONG if isinstance(error, InputError) else FAILED, str(error))
    except Exception as error:  # noqa: BLE001  # it may come of another host's death
        traceback.print_exc()
        _end(LOST, f"host {group.index} failed: {_words(error)}")
    sys.exit(LEFT)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no reason').splitlines()[0]}"


def _end(status: int, sentence: str) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    os._exit(status)  # the end of a JAX that has lost its hosts would be another status


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(LOST)


if __name__ == "__main__":
    main()
