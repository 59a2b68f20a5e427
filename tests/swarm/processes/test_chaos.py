"""What kills processes for the soak and the goodput benchmark keeps its pace, however long they need to come back."""

import random
import signal
from itertools import count, pairwise
from types import SimpleNamespace

from benchmarks import chaos
from benchmarks.chaos import Swarm, torment


def test_the_next_kill_waits_for_nobody_and_takes_nobody_twice(tmp_path, monkeypatch):
    clock, fresh = count(), count(100)
    time = SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: float(next(clock)))
    monkeypatch.setattr(chaos, "time", time)
    pids, due = {f"m{number}": number for number in range(4)} | {"coordinator": 9}, {}
    killed = []

    class Played(Swarm):
        def pids(self):
            for pid in list(due):  # it is seen as it was for a while, then it is back as another process
                due[pid] -= 1
                if not due[pid]:
                    name = next(name for name, each in pids.items() if each == pid)
                    pids[name] = next(fresh)
                    del due[pid]
            return dict(pids)

    swarm = Played(tmp_path, [])
    swarm.process = type("Alive", (), {"poll": lambda self: None})()

    def kill(pid, number):
        assert pid not in due, "killed twice"
        due[pid] = 40
        killed.append(pid)

    monkeypatch.setattr(chaos.os, "kill", kill)
    kills = torment(swarm, random.Random(0), 600.0, lambda: 30.0, "m")
    ways = [after.at - before.at for before, after in pairwise(kills)]
    assert len(kills) == len(killed) > 10 and not due and 9 in pids.values()
    assert max(ways) < 40 < min(each.back for each in kills)


def test_what_is_stopped_goes_on_after_a_minute_unless_it_was_replaced(tmp_path, monkeypatch):
    clock = count()
    time = SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: float(next(clock)))
    monkeypatch.setattr(chaos, "time", time)
    sent = []
    monkeypatch.setattr(chaos.os, "kill", lambda pid, number: sent.append((pid, number)))

    class Played(Swarm):
        def pids(self):
            return {"m0": 1}

    swarm = Played(tmp_path, [])
    swarm.process = type("Alive", (), {"poll": lambda self: None})()
    assert torment(swarm, random.Random(0), 300.0, lambda: 5.0, "m", stopped=1.0) == []
    assert len(sent) > 4 and sent == [(1, signal.SIGSTOP), (1, signal.SIGCONT)] * (len(sent) // 2)
