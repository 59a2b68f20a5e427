"""Calls made together and processes that hang, in threads and under the virtual clock."""

import threading

import pytest

from tpuswarm.swarm.engines.inproc import Inproc
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.processes.effects import Call, Do, Over, Together, Unreachable


def make_calls(*calls: Call):
    return (yield Together(calls))


class Server:
    def double(self, number: int) -> int:
        return 2 * number


class MeetingServer(Server):
    """Answers a call only while another one is under way."""

    def __init__(self):
        self._both = threading.Barrier(2)

    def double(self, number: int) -> int:
        self._both.wait(timeout=60)
        return 2 * number


def call_in_threads(*calls: Call):
    server, found = MeetingServer(), []

    def carry(call: Call):
        if call.address == "nobody":
            raise Unreachable(call.address)
        return getattr(server, call.method)(*call.arguments)

    def process():
        found.append((yield from make_calls(*calls)))

    node = NodeThreads(carry)
    node.start("calls", process())
    assert node.wait(60)
    if node.failure:
        raise node.failure
    return found[0]


def test_threads_make_calls_at_once_and_answer_each():
    calls = [Call("a", "double", (1,)), Call("nobody", "double", (2,)), Call("b", "double", (3,))]
    first, second, third = call_in_threads(*calls)
    assert (first, third) == (2, 6) and isinstance(second, Unreachable)
    assert call_in_threads() == []


def test_unexpected_error_of_a_call_is_raised():
    with pytest.raises(AttributeError, match="halve"):
        call_in_threads(Call("a", "halve", (1,)), Call("nobody", "double", (1,)))


def test_calls_under_the_virtual_clock_take_as_long_as_the_slowest():
    travel_s = {"slow": 2.0, "fast": 0.5}
    engine = Inproc(1, seconds=lambda rnd, name: 0.0)
    engine.travels = lambda node, call, back: travel_s[call.address]
    for name in travel_s:
        engine.serve(name, Server())

    def answers(*calls):
        found = []
        engine.spawn("me", make_calls(*calls), found.append)
        assert engine.run(lambda: bool(found), 100)
        return found[0]

    both = Call("slow", "double", (1,)), Call("fast", "double", (2,))
    assert answers(*both) == [2, 4] and engine.now == 4.0
    engine.kill("fast")
    first, second = answers(*both)
    assert first == 2 and isinstance(second, Unreachable)
    assert answers() == []


def test_node_that_ended_does_not_wait_for_a_hung_process():
    never, hung = threading.Event(), threading.Event()

    def train():
        yield Do("member trains", lambda: hung.set() or never.wait(60))

    def exchange():
        yield Do("member waits", lambda: hung.wait(60))
        raise Over("fenced")

    node = NodeThreads(lambda call: None)
    node.start("train", train())
    node.start("exchange", exchange())
    assert not node.drain(0.1) and isinstance(node.failure, Over)
    never.set()
    assert node.drain(60)
