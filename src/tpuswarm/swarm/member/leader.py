"""A member of several hosts: host 0 is the member of the swarm; the others repeat its calls on their devices.

A program over several hosts runs when all of them dispatch it, in the same order. So host 0 sends each call of its
device state to the others and then makes it itself; a lock holds the two together, because two threads call.
The others make the same calls in sequence on a device state of their own, hold the same versions, and never talk to the
swarm. A host that dies ends the others (train/hosts/control_channel.py): to the swarm that is one lost member.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from tpuswarm.swarm.core.member_state import Adopt
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.member.device_state import Evaluation, Payload
from tpuswarm.swarm.member.program_state import ProgramState
from tpuswarm.swarm.member.shared_params import Flat
from tpuswarm.swarm.storage import tensors
from tpuswarm.train.hosts.control_channel import Message
from tpuswarm.train.hosts.rendezvous import Hosts
from tpuswarm.train.loop.evaluate import Part
from tpuswarm.train.recipe import State

PIECE_BYTES = 2**22
"""Arrays are sent in pieces: a step must not wait until a whole version is sent."""

MakeState = Callable[[Sequence[np.ndarray]], ProgramState]
"""Makes a device state around a version, float32[size] for each fragment."""
Initialize = Callable[[], Sequence[np.ndarray]]
"""Makes a first state, with a program over all hosts, as float32[size] for each fragment."""


class Leader:
    """Host 0's programs, which it has the other hosts run as well."""

    def __init__(self, hosts: Hosts, make_state: MakeState, initialize: Initialize):
        """make_state, initialize: as the other hosts give `follow`."""
        self._hosts, self._make_state, self._initialize = hosts, make_state, initialize
        self._order = threading.Lock()
        self._arrays = threading.Lock()

    def make_state(self, fragments: Sequence[np.ndarray]) -> "LeaderState":
        """Make the device state of a new incarnation around a version, float32[size] for each fragment."""
        self.send_call("make_state", fragments)
        return LeaderState(self, self._make_state(fragments), self._order)

    def initialize(self) -> Sequence[np.ndarray]:
        """Make a first state."""
        self.send_call("initialize")
        return self._initialize()

    def send_call(self, call: str, arrays: Sequence[np.ndarray] = (), **arguments: Any) -> None:
        """Have the other hosts make a call. Other calls may overtake its arrays."""
        if not arrays:
            self._hosts.send({"call": call, "arguments": arguments})
            return
        with self._arrays:  # one call at a time
            for array in arrays:
                pieces = np.array_split(array, max(1, -(-array.nbytes // PIECE_BYTES)))
                for left, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
                    self._hosts.send({"pieces_left": left}, tensors.encode({"piece": piece}))
            self._hosts.send({"call": call, "arguments": arguments})


class _Placed(NamedTuple):
    number: int
    version: Flat


class LeaderState:
    """The DeviceState at host 0."""

    def __init__(self, lead: Leader, state: ProgramState, order: threading.Lock):
        self._lead, self._state, self._order = lead, state, order
        self._versions = 0

    def train(self, rows: Rows, progress: tuple[int, int], ahead: Rows) -> int:
        with self._order:
            self._lead.send_call("train", rows=rows.ranges, progress=progress, ahead=ahead.ranges)
            return self._state.train(rows, progress, ahead)

    def settle(self) -> int:
        return self._state.settle()

    def snapshot(self) -> Flat:
        with self._order:
            self._lead.send_call("snapshot")
            return self._state.snapshot()

    def payload(self, snapshot: Flat) -> Payload:
        with self._order:
            self._lead.send_call("code")
            coded = self._state.code(snapshot)
        return self._state.fetch(coded)

    def place(self, fragments: Sequence[np.ndarray]) -> _Placed:
        self._versions += 1
        self._lead.send_call("place", fragments, number=self._versions)
        return _Placed(self._versions, self._state.place(fragments))

    def adopt(self, adopt: Adopt, version: _Placed, own_share: float) -> None:
        with self._order:
            self._lead.send_call("adopt", how=adopt.how, number=version.number, own_share=own_share)
            self._state.adopt(adopt, version.version, own_share)

    def evaluate(
        self, stop: Callable[..., bool], average: _Placed | None, version: int, tokens: int
    ) -> Evaluation | None:
        """Evaluate on all hosts, part by part, so that the exchange's programs run in between."""
        mean = None if average is None else average.version
        with self._order:
            self._lead.send_call("publish", average=None if average is None else average.number)
            state = self._state.published_state(mean)

        @contextmanager
        def dispatching(part: Part) -> Iterator[None]:
            with self._order:
                self._lead.send_call("evaluate_part", part=part)
                yield

        try:
            return self._state.evaluate_state(state, stop, mean, version, tokens, dispatching)
        finally:
            self._lead.send_call("unpublish")

    def ramp(self) -> None:
        with self._order:
            self._lead.send_call("ramp")
            self._state.ramp()


def follow(hosts: Hosts, make_state: MakeState, initialize: Initialize) -> None:
    """At every other host: make the calls that host 0 sends, until it says farewell."""
    follower = _Follower(make_state, initialize)
    while message := hosts.receive():
        follower.receive(message)
    follower.wait()


class _Follower:
    def __init__(self, make_state: MakeState, initialize: Initialize):
        self._make_state, self._initialize = make_state, initialize
        self._pieces: list[np.ndarray] = []
        self._arrays: list[np.ndarray] = []
        self._state: ProgramState | None = None
        self._snapshot: Flat = []
        self._squares: list[jax.Array] = []
        """Squares of the newest contribution, to wait for."""
        self._placed: dict[int, Flat] = {}
        """Versions and averages on the devices by number, until they are used."""
        self._published: State | None = None
        """What is evaluated."""

    def wait(self) -> None:
        """Wait for all dispatched work. Host 0 stays until then: a sum over hosts would never end without it."""
        jax.block_until_ready((self._state and self._state.state, self._squares))

    def receive(self, message: Message) -> None:
        """Store a piece of an array, or make a call."""
        about, data = message
        if "call" in about:
            getattr(self, about["call"])(**about["arguments"])
            return
        self._pieces.append(tensors.decode(bytes(data))["piece"])
        if not about["pieces_left"]:
            self._arrays.append(np.concatenate(self._pieces))
            self._pieces = []

    def initialize(self) -> None:
        self._initialize()  # host 0 uses the result

    def make_state(self) -> None:
        self._state, self._published, self._snapshot, self._placed = None, None, [], {}  # frees memory for the new one
        self._state = self._make_state(self._received_arrays())

    def train(self, rows: list[list[int]], progress: list[int], ahead: list[list[int]]) -> None:
        assert self._state is not None
        done, total = progress
        self._state.train(_rows(rows), (done, total), _rows(ahead))

    def snapshot(self) -> None:
        assert self._state is not None
        self._snapshot = self._state.snapshot()

    def code(self) -> None:
        assert self._state is not None
        self._squares = self._state.code(self._snapshot).squares
        self._snapshot = []  # frees the memory of a whole version

    def place(self, number: int) -> None:
        assert self._state is not None
        last = {number - 1: self._placed[number - 1]} if number - 1 in self._placed else {}
        self._placed = {**last, number: self._state.place(self._received_arrays())}

    def adopt(self, how: Any, number: int, own_share: float) -> None:
        assert self._state is not None
        self._state.adopt(Adopt(how, None, number, ()), self._placed.pop(number), own_share)

    def publish(self, average: int | None) -> None:
        assert self._state is not None
        self._published = self._state.published_state(None if average is None else self._placed.pop(average))

    def evaluate_part(self, part: list[Any]) -> None:
        assert self._state is not None
        self._state.evaluate_part(self._published, Part(*part))

    def unpublish(self) -> None:
        self._published = None  # frees the memory of a whole state

    def ramp(self) -> None:
        assert self._state is not None
        self._state.ramp()

    def _received_arrays(self) -> list[np.ndarray]:
        arrays, self._arrays = self._arrays, []
        return arrays


def _rows(ranges: list[list[int]]) -> Rows:
    return Rows(tuple((start, stop) for start, stop in ranges))
