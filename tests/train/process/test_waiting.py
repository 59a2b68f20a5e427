"""A terminal shows the current wait and hides typed text; other outputs show nothing."""

import signal
import sys
import termios

import pytest

from tests.terminal import CTRL_C, SMALL, terminal
from tpuswarm.train.process.waiting import waiting

HEAD = """
import signal, sys, time
from rich.text import Text
from tpuswarm.train.look.widgets import start_live_region
from tpuswarm.train.process.stop import InterruptHandler
from tpuswarm.train.process.waiting import stderr_console, waiting

def show_view():
    return start_live_region(stderr_console(), lambda width, height: Text("the view"))
"""
WAITS = f"""{HEAD}
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})

def go_on():
    signal.sigwait({{signal.SIGUSR1}})

with waiting("reading the data", delay_s=0.0) as far:
    go_on()
    far("3 of 7 files")
    go_on()
live = show_view()
stderr_console().print("something happened")
with waiting("evaluating", delay_s=0.1):
    go_on()
with waiting("something short", delay_s=3600):
    pass
go_on()
live.stop()
print("the end")
"""
READS = f"""{HEAD}
interrupts = InterruptHandler()
try:
    live = show_view()
    with waiting("a wait", delay_s=0.0):
        %s
    live.stop()
    print("it is over")
    sys.stdin.readline()
except KeyboardInterrupt:
    interrupts.end(None)
"""


def test_waits_appear_on_a_terminal_under_the_view_and_disappear(tmp_path):
    with terminal([sys.executable, "-c", WAITS], tmp_path, SMALL) as opened:
        for words in ("reading the data … 0:0", "reading the data: 3 of 7 files … 0:0", "evaluating … 0:0"):
            opened.wait(words)
            if words.startswith("reading"):
                opened.process.send_signal(signal.SIGUSR1)
        assert opened.lines.index("something happened") < opened.lines.index("the view")
        assert "reading" not in opened.screen
        opened.process.send_signal(signal.SIGUSR1)
        opened.wait(lambda terminal: "evaluating" not in terminal.screen and "the view" in terminal.screen)
        opened.process.send_signal(signal.SIGUSR1)
        shown = opened.finish()
    assert "the end" in shown and "short" not in shown and shown.count("the view") == 1


def test_view_returns_below_the_lines_of_a_shell_after_ctrl_z(tmp_path):
    with terminal([sys.executable, "-c", READS % "time.sleep(600)"], tmp_path) as opened:
        opened.wait("a wait … ")
        assert not opened._screen.cursor.hidden, "a shell would have no cursor"
        modes = termios.tcgetattr(opened._end)
        opened.process.send_signal(signal.SIGSTOP)
        modes[3] |= termios.ECHO
        termios.tcsetattr(opened._end, termios.TCSANOW, modes)  # as the shell does
        opened.send(b"\x16\rin the shell\r\r")  # an echo, in the place of its output
        opened.wait("in the shell")
        opened.process.send_signal(signal.SIGCONT)
        opened.wait(lambda it: not termios.tcgetattr(it._end)[3] & termios.ECHO and it.screen.count("the view") == 2)
        before, after = opened.screen.split("in the shell")
        assert "the view" in before and "the view" in after and "a wait … " in after


@pytest.mark.parametrize(
    ("then", "code"),
    [("sys.stdin.readline(); sys.stdin.readline()", 0), ("time.sleep(600)", 130), ("sys.stdin.readline(); 1 / 0", 1)],
    ids=["end", "ctrl-c", "crash"],
)
def test_typed_text_is_hidden_only_while_a_view_is_drawn(tmp_path, then, code):
    with terminal([sys.executable, "-c", READS % then], tmp_path) as opened:

        def echoes():
            return bool(termios.tcgetattr(opened._end)[3] & termios.ECHO)

        assert echoes()
        opened.wait("a wait … ")
        assert not echoes()
        opened.send(CTRL_C if code == 130 else b"typed\r\r")
        if not code:
            opened.wait("it is over")
            assert echoes() and opened.text.count("the view") == 1 and "typed" not in opened.text
            opened.send(b"\r")
        while opened.read():
            pass
        assert opened.process.wait() == code and echoes()


LOSES_A_HOST = f"""{HEAD}
import threading
from tpuswarm.train.hosts.control_channel import end_process

live = show_view()
with waiting("a wait", delay_s=0.0):
    threading.Thread(target=end_process, args=["host 1 is gone"]).start()
    time.sleep(600)
"""


def test_sentence_of_a_process_that_a_thread_ends_is_the_last_line(tmp_path):
    """And typed text is shown again."""
    with terminal([sys.executable, "-c", LOSES_A_HOST], tmp_path) as opened:
        shown = opened.finish(1)
        assert termios.tcgetattr(opened._end)[3] & termios.ECHO
    assert shown.rstrip().split("\n")[-1] == "host 1 is gone" and "a wait" not in shown


def test_nothing_is_written_elsewhere_and_errors_pass(capsys):
    with pytest.raises(KeyError), waiting("reading the data", delay_s=0.0) as far:
        far("half")
        raise KeyError("x")
    assert capsys.readouterr() == ("", "")
