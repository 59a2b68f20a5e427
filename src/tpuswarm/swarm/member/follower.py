"""Another host of a member of several hosts: its process, and the plan that host 0 sends it.

A separate process, because a host that loses another one has to end (train/hosts/control_channel.py).
supervision/join.py starts `python -m tpuswarm.swarm.member.follower` and reads its exit status and the lines on its
stderr.
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

from tpuswarm.errors import InputError, TpuswarmError, first_line
from tpuswarm.swarm.member import data_files as files
from tpuswarm.swarm.member.group import FIRST_STEP_LINE, Group
from tpuswarm.swarm.member.leader import follow
from tpuswarm.swarm.member.program import make_program
from tpuswarm.swarm.processes.run_plan import RunPlan
from tpuswarm.train.hosts.control_channel import ExitStatus
from tpuswarm.train.hosts.rendezvous import Hosts, HostsAbsent, SecretRefused
from tpuswarm.train.process import platform
from tpuswarm.train.recipe import Metrics
from tpuswarm.train.user_code import blame

_PLAN: TypeAdapter[RunPlan] = TypeAdapter(RunPlan)


def send_plan(hosts: Hosts, plan: RunPlan, data: Path, evaluates: bool, batch: int | None) -> None:
    """At host 0: send the plan and the files of the folder `data` to the other hosts."""
    if hosts.count > 1:
        hosts.send({"plan": _PLAN.dump_python(plan, mode="json"), "evaluates": evaluates, "batch": batch})
        files.send(hosts, data, plan.files)


def run_plan(hosts: Hosts, say: Callable[[str], None]) -> None:
    """At every other host: make the program and follow host 0 until it says farewell."""
    message = hosts.receive()
    if message is None:
        return
    plan = _PLAN.validate_python(message[0]["plan"])
    flag = "--xla_gpu_deterministic_ops"  # JAX has started: too late to set it here
    if (
        plan.settings["deterministic"]
        and jax.default_backend() == "gpu"
        and flag not in os.environ.get("XLA_FLAGS", "")
    ):
        raise InputError(f"the run is --deterministic: set XLA_FLAGS={flag}=true on this host and join again")
    folder = files.cache_folder(plan)
    files.receive(hosts, folder, plan.files)
    on_step = _FirstStepLine().on_step
    about = message[0]
    program = make_program(plan, folder, jax.devices(), about["evaluates"], on_step, say, about["batch"])
    hosts.require_equal(program.facts())
    platform.lower_priority()
    follow(hosts, program.make_state, program.initialize)


class _FirstStepLine:
    """Writes a line on stderr once the first step is done."""

    dispatched = 0

    def on_step(self, number: int, metrics: Metrics) -> None:
        self.dispatched += 1
        if self.dispatched == 3:  # each step waits for the one before the last
            sys.stderr.write(f"{FIRST_STEP_LINE}\n")
            sys.stderr.flush()


def main() -> NoReturn:
    """Run the process; its parent holds the other end of its stdin."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    screen = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries of JAX print to stdout

    def say(text: str) -> None:
        screen.write(f"{text}\n")

    group = Group.from_environment()
    assert group is not None
    try:
        hosts = group.gather()
    except HostsAbsent as error:
        _exit(ExitStatus.ABSENT, str(error))
    except SecretRefused as error:  # after the death of a head, the token of the next one may come a moment later
        _exit(ExitStatus.REFUSED, str(error))
    except InputError as error:
        _exit(ExitStatus.WRONG_INPUT, str(error))
    except Exception as error:  # noqa: BLE001  # any other error would repeat at the next try
        traceback.print_exc()
        _exit(ExitStatus.FAILED, f"host {group.index} could not start: {_describe(error)}")
    say(f"host {group.index} of {group.count} is connected to host 0")
    try:
        with hosts, blame("the recipe fails"):
            run_plan(hosts, say)
    except TpuswarmError as error:
        _exit(ExitStatus.WRONG_INPUT if isinstance(error, InputError) else ExitStatus.FAILED, str(error))
    except Exception as error:  # noqa: BLE001  # possibly caused by another host's death
        traceback.print_exc()
        _exit(ExitStatus.LOST, f"host {group.index} failed: {_describe(error)}")
    sys.exit(ExitStatus.LEFT)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _exit(status: int, sentence: str) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    os._exit(status)  # JAX would exit with another status after losing its hosts


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(ExitStatus.LOST)


if __name__ == "__main__":
    main()
