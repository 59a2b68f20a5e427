"""A host that hangs: its connection stays open, and it sends nothing."""

import signal

import pytest

from tests.hosts import signal_host, start_hosts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("victim", [0, 1])
def test_hung_host_ends_the_other_with_one_sentence(tmp_path, victim):
    started = start_hosts("tests.train.host", tmp_path)
    sentence = signal_host(started, tmp_path, (tmp_path / f"{1 - victim}.step").exists, victim, signal.SIGSTOP)
    assert sentence == f"host {victim} is gone (silent for 15 s), so this host stops too; start all hosts again\n"
