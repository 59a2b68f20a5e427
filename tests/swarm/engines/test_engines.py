"""Calls made together: at once, each with its own answer, in both engines."""

import threading

import numpy as np
import pytest

from tpuswarm.swarm.engines.inproc import Inproc
from tpuswarm.swarm.engines.ray import seconds_for
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.processes.effects import Call, Do, Over, Together, Unreachable


def asking(*calls: Call):
    return (yield Together(calls))


class Meets:
    """Answers only while another one is asked too."""

    def __init__(self):
        self._both = threading.Barrier(2)

    def double(self, number: int) -> int:
        self._both.wait(timeout=20)
        return 2 * number


def in_threads(*calls: Call):
    servers = {"a": Meets()}
    servers["b"] = servers["a"]

    def carry(call: Call):
        if call.address not in servers:
            raise Unreachable(call.address)
        return getattr(servers[call.address], call.method)(*call.arguments)

    found = []

    def process():
        found.append((yield from asking(*calls)))

    node = NodeThreads(carry)
    node.start("asks", process())
    assert node.wait(30)
    if node.failure:
        raise node.failure
    return found[0]


def test_threads_make_calls_at_once_and_answer_each():
    calls = [Call("a", "double", (1,)), Call("nobody", "double", (2,)), Call("b", "double", (3,))]
    first, second, third = in_threads(*calls)
    assert (first, third) == (2, 6) and isinstance(second, Unreachable)
    assert in_threads() == []


def test_any_other_error_of_a_call_is_raised():
    with pytest.raises(AttributeError, match="halve"):
        in_threads(Call("a", "halve", (1,)), Call("nobody", "double", (1,)))


class Slow:
    def double(self, number: int) -> int:
        return 2 * number


def test_under_the_virtual_clock_they_take_as_long_as_the_slowest():
    took = {"slow": 2.0, "fast": 0.5}
    engine = Inproc(1, seconds=lambda rnd, name: 0.0)
    engine.travels = lambda node, call, back: took[call.address]
    for name in took:
        engine.serve(name, Slow())
    found = []
    engine.spawn("me", asking(Call("slow", "double", (1,)), Call("fast", "double", (2,))), found.append)
    assert engine.run(lambda: bool(found), 100) and found == [[2, 4]] and engine.now == 4.0
    engine.kill("fast")
    engine.spawn("me", asking(Call("slow", "double", (1,)), Call("fast", "double", (2,))), found.append)
    assert engine.run(lambda: len(found) == 2, 100)
    assert found[1][0] == 2 and isinstance(found[1][1], Unreachable)
    engine.spawn("me", asking(), found.append)
    assert engine.run(lambda: len(found) == 3, 100) and found[2] == []


def test_a_node_that_ended_waits_for_no_process_that_hangs():
    never, hung = threading.Event(), threading.Event()

    def trains():
        yield Do("member trains", lambda: hung.set() or never.wait(60))

    def talks():
        yield Do("member waits", lambda: hung.wait(20))
        raise Over("fenced")

    node = NodeThreads(lambda call: None)
    node.start("train", trains())
    node.start("exchange", talks())
    assert not node.drain(0.1) and isinstance(node.failure, Over)
    never.set()
    assert node.drain(20)


def test_a_call_is_waited_for_as_long_as_what_it_carries_needs():
    state = 6 * 10**9
    beat, push, fetch, merge = (seconds_for(Call("a", name, ()), state) for name in ("beat", "push", "fetch", "merge"))
    put = seconds_for(Call("a", "put", ("identity", 0, {"s": np.zeros(10 * 2**20, np.float32)}, "digest")), state)
    assert (beat, push, put) == (20.0, 60.0, 64.0) and 600 < fetch == merge < 660
    assert seconds_for(Call("a", "merge", ()), 10**6) < 61
