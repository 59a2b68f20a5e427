"""What is said while something is waited for, on a terminal and elsewhere."""

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

def key():
    signal.sigwait({signal.SIGUSR1})

with waiting("reading the data", short=0.0) as far:
    key()
    far("3 of 7 files")
    key()
live = region(stderr_console(), lambda width, height: Text("the view"))
stderr_console().print("something happened")
with waiting("evaluating", short=0.1):
    key()
with waiting("something short"):
    pass
key()
live.stop()
print("the end")
"""


def test_on_a_terminal_it_comes_and_goes(tmp_path):
    with terminal([sys.executable, "-c", PROGRAM], tmp_path, SMALL) as opened:
        opened.wait("reading the data … 0:00:0")
        opened.process.send_signal(signal.SIGUSR1)
        opened.wait("reading the data: 3 of 7 files … 0:00:0")
        opened.process.send_signal(signal.SIGUSR1)
        opened.wait("evaluating … 0:00:0")
        assert opened.lines.index("something happened") < opened.lines.index("the view")  # and under it what is awaited
        assert "reading" not in opened.screen
        opened.process.send_signal(signal.SIGUSR1)
        opened.wait(lambda each: "evaluating" not in each.screen and "the view" in each.screen)
        opened.process.send_signal(signal.SIGUSR1)
        shown = opened.finish()
    assert "the end" in shown and "short" not in shown and shown.count("the view") == 1


def test_elsewhere_nothing_is_said(capsys):
    with waiting("reading the data", short=0.0) as far:
        far("half")
    assert capsys.readouterr() == ("", "")


def test_an_error_passes(capsys):
    with pytest.raises(KeyError), waiting("anything"):
        raise KeyError("x")
    assert capsys.readouterr().err == ""
