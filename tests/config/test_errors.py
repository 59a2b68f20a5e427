"""What libraries say in many lines, or in none, is told in one."""

import pytest

from tpuswarm.errors import first_line


@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError("no room\non the disk"), "no room"), (ValueError("\n  left out"), "left out"), (KeyError(), "KeyError")],
)
def test_the_first_line_of_an_error(error, words):
    assert first_line(error) == words
