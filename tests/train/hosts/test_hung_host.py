"""A host that hangs: its connection stays open, and it sends nothing."""

import signal

import pytest

from tests.hosts import sentence_after, start_hosts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("victim", [0, 1])
def test_hung_host_ends_the_other_with_one_sentence(tmp_path, victim):
    started = start_hosts("tests.train.host", tmp_path, silence_s=6)
    sentence = sentence_after(started, tmp_path, (tmp_path / f"{1 - victim}.step").exists, victim, signal.SIGSTOP)
    assert sentence == f"host {victim} is gone (silent for 6 s), so this host stops too; start all hosts again\n"
