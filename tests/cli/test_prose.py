"""Sentences that commands print: wrapped on a terminal, one line each for programs."""

import shutil
import sys

import pytest

from tests import processes
from tests.terminal import SMALL, terminal

pytestmark = pytest.mark.slow

FOLDER = "runs/a-name-that-is-not-short"
PRINTS = """
from tpuswarm.train.process.terminal import clear_temporary_line, echo, print_temporary_line, wrap_standard_streams
wrap_standard_streams()
print_temporary_line("getting ready")
echo("error: " + "a few words, " * 12)
echo("warning: see /a/path/" + "that-is-long/" * 8 + "file, which is not cut", err=True)
print_temporary_line("nothing more")
clear_temporary_line()
"""


def test_lines_wrap_between_words(tmp_path, finished_run):
    shutil.copytree(finished_run.run, tmp_path / FOLDER)
    wide = 0
    for words, code in (
        (["evaluate", FOLDER], 0),
        (["train", "gpt2-tiny", "--batch", "999999999999"], 2),
        (["stop", FOLDER], 2),
        (["up", "--type", "v5e-8", "--zone", "us-west4-a", "--spot", "--down-when", "done", "--dry-run"], 0),
        (["init", "--provider", "rehearsal", "--type", "v5e-8", "--zone", "us-west4-a", "--yes", "--dry-run"], 0),
        (["exec", "all", "--detach", "--restart", "sometimes", "--", "true"], 2),
    ):
        out, err = processes.run(words, tmp_path, code)
        with terminal(words, tmp_path, SMALL) as opened:
            opened.finish(code)
        for line in [*out.splitlines(), *err.splitlines()]:
            if line.startswith(("error:", "runs/")) or line[:3].rstrip(". ").isdigit() or "; " in line[:90]:
                wide += len(line) > SMALL[0]
                assert " ".join(line.split()) in opened.sentences, f"{words}: {line!r} is not in\n{opened.text}"
    assert wide > 2


def test_paths_are_not_cut_and_labels_are_coloured(tmp_path):
    with terminal([sys.executable, "-c", PRINTS], tmp_path, SMALL) as opened:
        opened.finish()
    assert opened.lines[0].startswith("error: a few words") and opened.lines[0].endswith(" a few")
    assert "/a/path/" + "that-is-long/" * 8 + "file," in opened.flowing
    assert b"\x1b[1;31merror:" in opened.written and b"\x1b[33mwarning:" in opened.written
    assert "…" not in opened.text
    with terminal([sys.executable, "-c", PRINTS], tmp_path, SMALL, {"NO_COLOR": "1"}) as opened:
        opened.finish()
    assert b"\x1b[3" not in opened.written and b"error:" in opened.written
    with terminal([sys.executable, "-c", PRINTS], tmp_path, SMALL, {"TERM": "dumb"}) as opened:
        opened.finish()
    assert b"\x1b" not in opened.written and b"error:" in opened.written
