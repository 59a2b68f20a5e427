"""A member of several hosts: host 0 is the member of the swarm, the others repeat on their devices what it does.

A program over several hosts runs when all of them dispatch it, in one order. So host 0 tells the others each call of
its holder and then makes it itself; a lock holds the two together, because its processes call from two threads.
The others make the same calls, one after the other, on a holder of their own: they hold the same versions and never
talk to the swarm. A host that dies ends the others (train/hosts/line.py): to the swarm that is one lost member.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpuswarm.swarm.core.books import Adopt
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.member.arrays import wait
from tpuswarm.swarm.member.contract import Payload
from tpuswarm.swarm.member.exchanged import Flat
from tpuswarm.swarm.member.holder import ProgramHolder
from tpuswarm.swarm.storage import tensors
from tpuswarm.train.hosts.line import Message
from tpuswarm.train.hosts.rendezvous import Hosts

PIECE = 2**22
"""Bytes of an array sent at a time: a step must not wait for a whole version to be sent."""

MakeHolder = Callable[[Sequence[np.ndarray]], ProgramHolder]
"""A holder around a version: float32[size] of each fragment."""
Begin = Callable[[], Sequence[np.ndarray]]
"""Makes a first state, a program over all hosts: float32[size] of each fragment."""


class Lead:
    """At host 0: the programs of a member of several hosts."""

    def __init__(self, hosts: Hosts, make_holder: MakeHolder, begin: Begin):
        """make_holder, begin: the same as the other hosts give `follow`."""
        self._hosts, self._make_holder, self._begin = hosts, make_holder, begin
        self._order = threading.Lock()
        self._arrays = threading.Lock()

    def holder(self, fragments: Sequence[np.ndarray]) -> "LeadHolder":
        """The holder of a new incarnation, around a version: float32[size] of each fragment."""
        self.tell("holder", fragments)
        return LeadHolder(self, self._make_holder(fragments), self._order)

    def begin(self) -> Sequence[np.ndarray]:
        """A first state."""
        self.tell("begin")
        return self._begin()

    def tell(self, call: str, arrays: Sequence[np.ndarray] = (), **arguments: Any) -> None:
        """Have the other hosts make a call, with arrays or without; other calls may pass while arrays are sent."""
        if not arrays:
            self._hosts.send({"call": call, "arguments": arguments})
            return
        with self._arrays:  # those of one call at a time
            for array in arrays:
                pieces = np.array_split(array, max(1, -(-array.nbytes // PIECE)))
                for left, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
                    self._hosts.send({"pieces_left": left}, tensors.encode({"piece": piece}))
            self._hosts.send({"call": call, "arguments": arguments})


class _Placed(NamedTuple):
    number: int
    version: Flat


class LeadHolder:
    """The holder at host 0; see contract.Holder."""

    def __init__(self, lead: Lead, holder: ProgramHolder, order: threading.Lock):
        self._lead, self._holder, self._order = lead, holder, order
        self._versions = 0

    def train(self, rows: Rows, progress: tuple[int, int], ahead: Rows) -> int:
        """One step."""
        with self._order:
            self._lead.tell("train", rows=rows.ranges, progress=progress, ahead=ahead.ranges)
            return self._holder.train(rows, progress, ahead)

    def settle(self) -> int:
        """Wait for the newest step."""
        return self._holder.settle()

    def snapshot(self) -> Flat:
        """A copy of the shared state."""
        with self._order:
            self._lead.tell("snapshot")
            return self._holder.snapshot()

    def payload(self, snapshot: Flat) -> Payload:
        """The newest snapshot, encoded."""
        with self._order:
            self._lead.tell("code")
            coded = self._holder.code(snapshot)
        return self._holder.fetch(coded)

    def place(self, fragments: Sequence[np.ndarray]) -> _Placed:
        """A version to the devices of all hosts."""
        self._versions += 1
        self._lead.tell("place", fragments, number=self._versions)
        return _Placed(self._versions, self._holder.place(fragments))

    def adopt(self, adopt: Adopt, version: _Placed, keep: float) -> None:
        """Come to a version."""
        with self._order:
            self._lead.tell("adopt", how=adopt.how, number=version.number, keep=keep)
            self._holder.adopt(adopt, version.version, keep)

    def evaluate(self, leave: Callable[[], bool], average: object, version: int, tokens: int) -> None:
        """Nothing: the other hosts have no held-out rows. A run of such members alone has no held-out loss."""

    def ramp(self) -> None:
        """Begin with small updates."""
        with self._order:
            self._lead.tell("ramp")
            self._holder.ramp()


def follow(hosts: Hosts, make_holder: MakeHolder, begin: Begin) -> None:
    """At every other host: make the calls that host 0 makes, until it says farewell."""
    follower = _Follower(make_holder, begin)
    while message := hosts.receive():
        follower.take(message)
    follower.rest()


class _Follower:
    def __init__(self, make_holder: MakeHolder, begin: Begin):
        self._make_holder, self._begin = make_holder, begin
        self._pieces: list[np.ndarray] = []
        self._arrays: list[np.ndarray] = []
        self._holder: ProgramHolder | None = None
        self._snapshot: Flat = []
        self._squares: list[jax.Array] = []
        """Of the newest contribution, to know when it is computed."""
        self._placed = _Placed(0, [])

    def rest(self) -> None:
        """Wait for all that was dispatched: host 0 stays until then, and a sum without it would never end."""
        wait((self._holder and self._holder.state, self._squares))

    def take(self, message: Message) -> None:
        """Arrays, or a call."""
        about, data = message
        if "call" in about:
            getattr(self, about["call"])(**about["arguments"])
            return
        self._pieces.append(tensors.decode(bytes(data))["piece"])
        if not about["pieces_left"]:
            self._arrays.append(np.concatenate(self._pieces))
            self._pieces = []

    def begin(self) -> None:
        self._begin()  # host 0 keeps what comes of it

    def holder(self) -> None:
        self._holder, self._snapshot, self._placed = None, [], _Placed(0, [])  # room for the new one
        self._holder = self._make_holder(self._taken())

    def train(self, rows: list[list[int]], progress: list[int], ahead: list[list[int]]) -> None:
        assert self._holder is not None
        done, whole = progress
        self._holder.train(_rows(rows), (done, whole), _rows(ahead))

    def snapshot(self) -> None:
        assert self._holder is not None
        self._snapshot = self._holder.snapshot()

    def code(self) -> None:
        assert self._holder is not None
        self._squares = self._holder.code(self._snapshot).squares
        self._snapshot = []  # a whole version, which nobody needs until the next

    def place(self, number: int) -> None:
        assert self._holder is not None
        self._placed = _Placed(number, self._holder.place(self._taken()))

    def adopt(self, how: Any, number: int, keep: float) -> None:
        assert self._holder is not None and number == self._placed.number
        self._holder.adopt(Adopt(how, None, number, ()), self._placed.version, keep)

    def ramp(self) -> None:
        assert self._holder is not None
        self._holder.ramp()

    def _taken(self) -> list[np.ndarray]:
        arrays, self._arrays = self._arrays, []
        return arrays


def _rows(ranges: list[list[int]]) -> Rows:
    return Rows(tuple((start, stop) for start, stop in ranges))
