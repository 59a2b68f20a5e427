"""What is typed while a view is drawn is not shown; afterwards it is."""

import sys
import termios

import pytest

from tests.terminal import CTRL_C, terminal

PROGRAM = """
import sys, time
from rich.text import Text
from tpuswarm.train.look.live import region
from tpuswarm.train.process.stop import Interrupts
from tpuswarm.train.process.waiting import stderr_console, waiting
interrupts = Interrupts()
try:
    live = region(stderr_console(), lambda width, height: Text("the view"))
    with waiting("a wait", short=0.0):
        {then}
    live.stop()
    print("it is over")
    sys.stdin.readline()
except KeyboardInterrupt:
    interrupts.end(None)
"""


@pytest.mark.parametrize(
    ("then", "code"),
    [("sys.stdin.readline(); sys.stdin.readline()", 0), ("time.sleep(600)", 130), ("sys.stdin.readline(); 1 / 0", 1)],
    ids=["end", "ctrl-c", "crash"],
)
def test_typed_text_is_hidden_only_while_a_view_is_drawn(tmp_path, then, code):
    with terminal([sys.executable, "-c", PROGRAM.format(then=then)], tmp_path) as opened:

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
