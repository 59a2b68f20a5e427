"""A terminal shows what is waited for; elsewhere nothing is written."""

import signal
import sys

import pytest

from tests.terminal import SMALL, terminal
from tpuswarm.train.process.waiting import waiting

PROGRAM = """
import signal
from rich.text import Text
from tpuswarm.train.look.live import region
from tpuswarm.train.process.waiting import stderr_console, waiting

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

def go_on():
    signal.sigwait({signal.SIGUSR1})

with waiting("reading the data", short=0.0) as far:
    go_on()
    far("3 of 7 files")
    go_on()
live = region(stderr_console(), lambda width, height: Text("the view"))
stderr_console().print("something happened")
with waiting("evaluating", short=0.1):
    go_on()
with waiting("something short", short=3600):
    pass
go_on()
live.stop()
print("the end")
"""


def test_waits_appear_on_a_terminal_under_the_view_and_disappear(tmp_path):
    with terminal([sys.executable, "-c", PROGRAM], tmp_path, SMALL) as opened:
        opened.wait("reading the data … 0:0")
        opened.process.send_signal(signal.SIGUSR1)
        opened.wait("reading the data: 3 of 7 files … 0:0")
        opened.process.send_signal(signal.SIGUSR1)
        opened.wait("evaluating … 0:0")
        assert opened.lines.index("something happened") < opened.lines.index("the view")
        assert "reading" not in opened.screen
        opened.process.send_signal(signal.SIGUSR1)
        opened.wait(lambda terminal: "evaluating" not in terminal.screen and "the view" in terminal.screen)
        opened.process.send_signal(signal.SIGUSR1)
        shown = opened.finish()
    assert "the end" in shown and "short" not in shown and shown.count("the view") == 1


def test_nothing_is_written_elsewhere_and_errors_pass(capsys):
    with pytest.raises(KeyError), waiting("reading the data", short=0.0) as far:
        far("half")
        raise KeyError("x")
    assert capsys.readouterr() == ("", "")
