"""Why a process died, by its log."""

import pytest

from tpuswarm.swarm.supervision.fatal_line import MAX_CHARS, fatal_line

EARLIER = "ValueError: of an earlier process\n"
OWN = "22:31:55.123 m0: a member's own note\n"
ABORTED = """\
W1129 22:32:16.750409   28838 hlo_pass.cc:12] slow
F1129 22:32:16.750409   28838 client.cc:234] Check failed: buffer != nullptr
*** Check failure stack trace: ***
    @     0x7f1c2d3e4f5a  absl::log_internal::LogMessage::Die()
*** SIGABRT received at time=1764455536 on cpu 1 ***
PC: @     0x7f1c2d3e4f5b  (unknown)  pthread_kill
[2026-11-29 22:32:16,751 E 28838 28838] logging.cc:496: *** SIGABRT received ***
Fatal Python error: Aborted

Stack (most recent call first):
  File "/model.py", line 3 in loss
Extension modules: numpy.core (total: 1)
"""
SEGMENTATION_FAULT = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f1c2d3e4f5a (most recent call first):
  File "/model.py", line 3 in loss
"""
TRACEBACK = """\
Traceback (most recent call last):
  File "/model.py", line 3, in loss
    raise KeyError("colour")
KeyError: 'colour'
"""


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("", ""),
        (OWN, ""),
        (ABORTED, "Check failed: buffer != nullptr"),
        (OWN + SEGMENTATION_FAULT, "Fatal Python error: Segmentation fault"),
        (TRACEBACK, "KeyError: 'colour'"),
        (TRACEBACK + OWN, ""),
        ("ValueError\nprinted by the user's model\n", ""),
        ("double free or corruption (out)\n", "double free or corruption (out)"),
        (f"RuntimeError: {'x' * MAX_CHARS}", f"RuntimeError: {'x' * (MAX_CHARS - 14)}"),
    ],
)
def test_error_is_found_in_what_the_newest_process_wrote(tmp_path, written, line):
    log = tmp_path / "m0.log"
    log.write_text(EARLIER)
    start = log.stat().st_size
    log.write_text(EARLIER + written)
    assert fatal_line(log, start) == line


def test_process_without_a_log_has_no_error(tmp_path):
    assert fatal_line(tmp_path / "m0.log", 0) == ""
