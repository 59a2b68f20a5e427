"""`exec`: one command on all hosts, its output, its end, and no processes left behind."""

import asyncio
import secrets
import signal
import subprocess

import pytest

from tests.processes import finish
from tests.remote.conftest import HOSTS, ONE, SLICE
from tests.terminal import CTRL_C, PROGRAM, terminal
from tests.waiting import until
from tpuswarm.cloud.rehearsal.connect import send_command
from tpuswarm.remote import remote_process

pytestmark = pytest.mark.slow


def test_words_are_taken_as_they_are_and_standard_input_is_empty(fleet):
    assert fleet.run("exec", "v2", "--", "echo", "$HOME", "a  b")[0] == f"{HOSTS[0]} │ $HOME a  b\n"
    out, _ = finish(fleet.start("exec", "v2", "--", "cat; echo end", stdin=subprocess.PIPE))
    assert out == f"{HOSTS[0]} │ end\n"


def test_output_of_all_hosts_has_their_names_one_summary_and_a_log_each(fleet):
    out, err = fleet.run("exec", "all", "--", "echo one; echo two >&2; echo $TPUSWARM_REHEARSAL_MACHINE")
    lines = out.splitlines()
    assert sorted(line for line in lines if line.endswith("one")) == [f"{name:<13} │ one" for name in HOSTS]
    assert sum(" │ v5e-usc1a-0-" in line for line in lines) == 4 and len(lines) == 10
    assert sum(line.endswith(" │ two") for line in err.splitlines()) == 5
    summary, place = err.splitlines()[-2:]
    assert summary == "5/5 ok" and place.startswith("logs: ~/state/tpuswarm/fleets/rehearsal/trio/exec/")
    logs = [log.name for log in (fleet.folder / place.removeprefix("logs: ~/")).iterdir()]
    assert sorted(logs) == sorted(f"{name.replace('/', '.')}.log" for name in HOSTS)


def test_summary_names_who_failed_and_how(fleet):
    line = "case $TPUSWARM_REHEARSAL_MACHINE in *-0-1-*) exit 255;; *-0-2-*) kill -9 $$;; v2*) exit 3;; esac"
    _, err = fleet.run("exec", "all", "--", line, code=1)
    assert "2/5 ok · v2-usc1f-0/0: exit 3 · v5e-usc1a-0/1: exit 255 · v5e-usc1a-0/2: exit 137 (SIGKILL)\n" in err
    _, err = fleet.run("exec", "slice", "--", "exit 7", code=7)  # the code that all hosts share
    assert "0/4 ok · v5e-usc1a-0/0, v5e-usc1a-0/1, v5e-usc1a-0/2 and 1 more: exit 7" in err


def test_wrong_words(fleet):
    for words in (("exec", "slice/5", "--", "true"), ("ssh", "slice")):
        wrong = fleet.run(*words, code=2)[1]
        assert f"slice is a pool, but a worker belongs to one machine: name one of {SLICE}\n" in wrong
    assert "--time-out must be above 0" in fleet.run("exec", "v2", "--time-out", "0", "--", "true", code=2)[1]
    assert "missing argument" in fleet.run("exec", "v2", code=2)[1]


WITH_SUDO = "sudo sleep {0} & sudo sh -c 'sleep {0}; true' & setsid -f sleep {0}"
"""Starts children; sudo drops the mark of the command, and its own environment cannot be read."""


def test_hung_command_is_ended_with_its_children_and_other_hosts_finish(fleet):
    line = f"case $TPUSWARM_REHEARSAL_MACHINE in v2*) {WITH_SUDO.format(4321)}; sleep 4321;; esac"
    _, err = fleet.run("exec", "all", "--time-out", "6", "--", line, code=1)
    assert f"4/5 ok · {HOSTS[0]}: was not done within 6 s" in err
    fleet.wait_until_gone("sleep 4321")


@pytest.mark.parametrize("obeys", [True, False])
def test_ctrl_c_ends_it_on_all_hosts_with_its_children_and_a_second_one_at_once(fleet, obeys):
    end = "trap 'echo bye; exit 3' INT" if obeys else "trap '' INT TERM"
    line = f"{end}; {WITH_SUDO.format(1234)}; echo up; while :; do sleep 0.05; done"
    with terminal(["exec", "all", "--", line], fleet.folder, env=fleet.environment) as shown:
        shown.wait(lambda screen: screen.text.count("│ up") == 5)
        shown.send(CTRL_C)
        shown.wait("asked it to end on 5 hosts; Ctrl-C again ends it at once")
        if not obeys:
            shown.send(CTRL_C)
        text = shown.finish(130)
    assert text.count("│ bye") == 5 * obeys
    ended = "exit 3" if obeys else "exit 137 (SIGKILL)"
    assert f"0/5 ok · v2-usc1f-0/0, v5e-usc1a-0/0, v5e-usc1a-0/1 and 2 more: {ended}" in shown.sentences
    fleet.wait_until_gone("sleep 1234")


def test_what_ignores_sigint_is_terminated_then_killed(machines, monkeypatch):
    original = remote_process._script()
    assert "turn < 100" in original and "turn = 50" in original

    def end(ignore: str, kill_turn: int) -> int:
        script = original.replace("turn < 100", f"turn < {kill_turn}").replace("turn = 50", "turn = 2")
        monkeypatch.setattr(remote_process, "_script", lambda: script)
        up = machines[0].home / "up"
        up.unlink(missing_ok=True)

        async def work(connections) -> int:
            line = f"{ignore}; touch up; while :; do sleep 0.05; done"
            running = remote_process.RemoteProcess(connections, machines.hosts[0], line)
            task = asyncio.create_task(running.run(lambda data, is_error: None))
            while not up.exists():
                await asyncio.sleep(0.02)
            running.end()
            return await task

        return machines.run(work)

    assert end("trap '' INT; trap 'exit 4' TERM", kill_turn=10_000) == 4
    assert end("trap '' INT TERM", kill_turn=4) == 137


@pytest.mark.parametrize("word", [b"end\n", b"now\n", b""])
def test_command_that_is_to_end_before_it_begins_does_not_run_on(word):
    """The script's own shell may be slower than the word that ends the command, as on a busy machine."""
    script = remote_process._script().replace("export TPUSWARM_EXEC=", "sleep 1; export TPUSWARM_EXEC=")
    line = "sleep 5679"
    command = ["/bin/sh", "-c", script, "tpuswarm-exec", line, secrets.token_hex(8)]
    done = subprocess.run(command, input=word, capture_output=True, timeout=240)
    assert done.returncode in (-signal.SIGINT, -signal.SIGKILL)


def test_nothing_is_left_of_a_command_whose_caller_was_killed(fleet):
    process = fleet.start("exec", "all", "--", "echo up; setsid -f sleep 3456; sleep 3456")
    for _ in range(5):
        assert process.stdout.readline().endswith("up\n")
    process.kill()
    process.communicate()
    fleet.wait_until_gone("sleep 3456")


def test_lost_host_is_reported_its_command_ends_and_others_finish(fleet, tmp_path):
    others = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; echo done"
    line = f"case $TPUSWARM_REHEARSAL_MACHINE in v2*) sleep 5678;; *) {others};; esac"
    process = fleet.start("exec", "all", "--", line)
    until(lambda: fleet.pids("sleep 5678"))
    send_command(fleet.place, "preempt", name=ONE, ending="gone")
    try:
        fleet.wait_until_gone("sleep 5678")
        (tmp_path / "go").touch()
        out, err = finish(process, 1)
    finally:
        fleet.run("up", "--yes", "--paid")
    assert out.count("done") == 4
    assert f"4/5 ok · {HOSTS[0]}: " in err, err


def test_flood_loses_and_breaks_no_line(fleet):
    script = "for ((n = 0; n < 20000; n++)); do echo $n-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx-$n; done"
    out, err = fleet.run("exec", "all", "--", script)
    by_host: dict[str, list[str]] = {}
    for line in out.splitlines():
        tag, _, text = line.partition(" │ ")
        by_host.setdefault(tag.strip(), []).append(text)
    wanted = [f"{n}-{'x' * 41}-{n}" for n in range(20_000)]
    assert by_host == dict.fromkeys(HOSTS, wanted), {name: len(lines) for name, lines in by_host.items()}
    assert "5/5 ok" in err


def test_command_ends_when_nobody_reads_its_output(fleet):
    line = f"{PROGRAM} exec all -- 'yes line' | head -3"
    done = subprocess.run(line, shell=True, cwd=fleet.folder, env=fleet.environment, capture_output=True, text=True)
    assert done.stdout.count("│ line") == 3 and "Traceback" not in done.stderr
    fleet.wait_until_gone("yes line")


def test_terminal_shows_which_hosts_are_still_running(fleet, tmp_path):
    line = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; echo done"
    with terminal(["exec", "all", "--", line], fleet.folder, env=fleet.environment) as shown:
        shown.wait("waiting for 5: v2-usc1f-0/0, v5e-usc1a-0/0, ")
        assert max(map(len, shown.lines)) < 80
        (tmp_path / "go").touch()
        text = shown.finish()
    assert "waiting for" not in shown.screen and text.count("│ done") == 5
