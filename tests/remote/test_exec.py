"""`exec`: one command on all workers, what it prints, how it ends, and what stays of it: nothing."""

import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.terminal import CTRL_C, PROGRAM, terminal
from tpuswarm.cloud.rehearsal.machines import processes

NAMES = ["v2-usc1f-0/0", *(f"v5e-usc1a-0/{worker}" for worker in range(4))]


def pids(fleet, word: str) -> list[int]:
    """Processes of all machines that have a word in their command line."""
    found = []
    for pid in processes.find([each.name for each in fleet.place.machines.iterdir()]):
        with suppress(OSError):
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def gone(fleet, word: str) -> None:
    end = time.monotonic() + 30
    while pids(fleet, word):
        assert time.monotonic() < end, f"{word} still runs"
        time.sleep(0.05)


def test_all_workers_answer_line_by_line_with_one_summary_and_a_log_each(fleet):
    out, err = fleet.run("exec", "all", "--", "echo one; echo two >&2; echo $TPUSWARM_REHEARSAL_MACHINE")
    lines = out.splitlines()
    assert sorted(line for line in lines if line.endswith("one")) == [f"{name:<13} │ one" for name in NAMES]
    assert sum(" │ v5e-usc1a-0-" in line for line in lines) == 4 and len(lines) == 10
    assert sum(line.endswith(" │ two") for line in err.splitlines()) == 5
    summary, place = err.splitlines()[-2:]
    assert summary == "5/5 ok" and place.startswith("logs: ~/state/tpuswarm/fleets/rehearsal/trio/exec/")
    logs = [each.name for each in (fleet.folder / place.removeprefix("logs: ~/")).iterdir()]
    assert sorted(logs) == sorted(f"{name.replace('/', '.')}.log" for name in NAMES)


def test_several_words_are_taken_as_they_are(fleet):
    out, _ = fleet.run("exec", "v2", "--", "echo", "$HOME", "a  b")
    assert out == "v2-usc1f-0/0 │ $HOME a  b\n"


def test_the_summary_says_who_failed_and_how(fleet):
    line = "case $TPUSWARM_REHEARSAL_MACHINE in *-0-1-*) exit 255;; *-0-2-*) kill -9 $$;; v2*) exit 3;; esac"
    _, err = fleet.run("exec", "all", "--", line, code=1)
    assert "2/5 ok · v2-usc1f-0/0: exit 3 · v5e-usc1a-0/1: exit 255 · v5e-usc1a-0/2: exit 137 (SIGKILL)\n" in err
    _, err = fleet.run("exec", "slice", "--", "exit 7", code=7)  # what all have in common is the command's own
    assert "0/4 ok · v5e-usc1a-0/0, v5e-usc1a-0/1, v5e-usc1a-0/2 and 1 more: exit 7" in err


def test_a_command_that_reads_gets_nothing(fleet):
    out, _ = fleet.finish(fleet.start("exec", "v2", "--", "cat; echo end", stdin=subprocess.PIPE))
    assert out == "v2-usc1f-0/0 │ end\n"


def test_what_is_asked_wrongly(fleet):
    wrong = fleet.run("exec", "v2-usc1f-8", "--", "true", code=2)[1]
    assert "there is no machine 'v2-usc1f-8'; did you mean v2-usc1f-0?" in wrong
    for words in (("exec", "slice/5", "--", "true"), ("ssh", "slice")):
        wrong = fleet.run(*words, code=2)[1]
        assert "slice is a pool, and a worker is one of a machine: name one of v5e-usc1a-0\n" in wrong
    assert "--time-out must be above 0" in fleet.run("exec", "v2", "--time-out", "0", "--", "true", code=2)[1]
    assert "missing argument" in fleet.run("exec", "v2", code=2)[1]


def test_a_host_that_hangs_is_ended_and_named_and_the_others_finish(fleet):
    line = "case $TPUSWARM_REHEARSAL_MACHINE in v2*) (setsid sleep 4321 &); sleep 4321;; *) echo done;; esac"
    out, err = fleet.run("exec", "all", "--time-out", "6", "--", line, code=1)
    assert out.count("done") == 4
    assert "4/5 ok · v2-usc1f-0/0: was not done within 6 s" in err
    gone(fleet, "4321")


def test_ctrl_c_ends_it_on_all_hosts_with_its_children(fleet):
    line = "trap 'echo bye; exit 3' INT; setsid sleep 1234 & sleep 1234 & echo up; while :; do sleep 0.05; done"
    with terminal(["exec", "all", "--", line], fleet.folder, env=fleet.environment) as shown:
        shown.wait(lambda screen: screen.text.count("│ up") == 5)
        shown.send(CTRL_C)
        said = shown.finish(130)
    assert said.count("│ bye") == 5
    assert "asked it to end on 5 hosts; Ctrl-C again ends it at once" in said
    assert "0/5 ok · v2-usc1f-0/0, v5e-usc1a-0/0, v5e-usc1a-0/1 and 2 more: exit 3" in shown.sentences
    gone(fleet, "1234")


def test_ctrl_c_twice_ends_at_once_what_does_not_listen(fleet):
    line = "trap '' INT TERM; echo up; while :; do sleep 2345; done"
    with terminal(["exec", "all", "--", line], fleet.folder, env=fleet.environment) as shown:
        shown.wait(lambda screen: screen.text.count("│ up") == 5)
        shown.send(CTRL_C)
        shown.wait("Ctrl-C again")
        began = time.monotonic()
        shown.send(CTRL_C)
        shown.finish(130)
    assert time.monotonic() - began < 9  # by itself it would be killed after ten seconds
    assert "exit 137 (SIGKILL)" in shown.sentences
    gone(fleet, "2345")


def test_nothing_stays_of_a_command_whose_caller_was_killed(fleet):
    process = fleet.start("exec", "all", "--", "echo up; (setsid sleep 3456 &); sleep 3456")
    for _ in range(5):
        assert process.stdout.readline().endswith("up\n")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    gone(fleet, "3456")


def test_a_lost_connection_is_said_and_what_ran_there_ends(fleet):
    line = "case $TPUSWARM_REHEARSAL_MACHINE in v2*) sleep 5678;; *) echo up; sleep 3; echo done;; esac"
    process = fleet.start("exec", "all", "--", line)
    for _ in range(4):
        process.stdout.readline()
    wait_for_it = time.monotonic() + 30
    while not pids(fleet, "5678") and time.monotonic() < wait_for_it:
        time.sleep(0.05)
    from tpuswarm.cloud.rehearsal.client import ask

    ask(fleet.place, "preempt", name="v2-usc1f-0", ending="gone")
    out, err = fleet.finish(process, 1)
    assert out.count("done") == 4
    assert "4/5 ok · v2-usc1f-0/0: " in err, err
    gone(fleet, "5678")
    fleet.run("up", "--yes", "--paid")


def test_a_flood_loses_and_breaks_no_line(fleet):
    script = "for ((n = 0; n < 20000; n++)); do echo $n-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx-$n; done"
    out, err = fleet.run("exec", "all", "--", script)
    by_host: dict[str, list[str]] = {}
    for line in out.splitlines():
        tag, _, text = line.partition(" │ ")
        by_host.setdefault(tag.strip(), []).append(text)
    wanted = [f"{n}-{'x' * 41}-{n}" for n in range(20_000)]
    assert by_host == dict.fromkeys(NAMES, wanted), {name: len(lines) for name, lines in by_host.items()}
    assert "5/5 ok" in err


def test_nobody_reads_what_is_printed_any_more(fleet):
    done = subprocess.run(
        f"{PROGRAM} exec all -- 'yes line' | head -3",
        shell=True, cwd=fleet.folder, env=fleet.environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.count("│ line") == 3 and "Traceback" not in done.stderr
    gone(fleet, "yes")


@pytest.mark.parametrize("size", [(80, 24)])
def test_who_is_waited_for_shows(fleet, size):
    with terminal(["exec", "all", "--", "sleep 3; echo done"], fleet.folder, size, fleet.environment) as shown:
        shown.wait("waiting for 5: v2-usc1f-0/0, v5e-usc1a-0/0, ")
        assert max(map(len, shown.lines)) < 80
        text = shown.finish()
    assert "waiting for" not in shown.screen and text.count("│ done") == 5
