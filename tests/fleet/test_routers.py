"""A keeper leads the fleet's routers to machines that come."""

import threading
from dataclasses import replace

import pytest

from tpuswarm.cloud.errors import Unreachable
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine, TpuSpec, VmSpec, Worker
from tpuswarm.fleet import routers
from tpuswarm.fleet.core.desired import Desired, Wanted

FLEET, ZONE = "f-abc123", "us-central1-f"
DESIRED = Desired(
    FLEET,
    (
        Wanted("small", TpuSpec("", ZONE, "v2-8", "spot", FLEET, "small", "v2-alpha"), (ZONE,), 2),
        Wanted("door", VmSpec("f-door", ZONE, "e2-small", FLEET, "door", "p/f", 10), (ZONE,), 1, routes=True),
    ),
)


def machine(name: str, address: str, pool: str = "small", created: float = 1.0) -> Machine:
    labels = {FLEET_LABEL: FLEET, POOL_LABEL: pool}
    kind = "vm" if pool == "door" else "tpu"
    workers = (Worker(address, None),)
    return Machine(
        name, ZONE, kind, "v2-8", "ready", "READY", how="spot", created=created, labels=labels, workers=workers
    )


DOOR = machine("f-door", "10.0.0.9", "door")
ZERO, ONE = machine("v2-usc1f-0", "10.0.0.1"), machine("v2-usc1f-1", "10.0.0.2")


@pytest.fixture
def routing(monkeypatch):
    """The routing, with the moments at which it told the routers: it is done with each when `seen` has returned."""
    told: list[str] = []
    calls: list[object] = []
    fails: list[Exception] = []

    async def route(reach, hosts):
        calls.append(hosts)
        if fails:
            raise fails.pop()

    monkeypatch.setattr(routers, "route", route)
    monkeypatch.setattr(routers, "router_hosts", lambda reach: ["f-door/0"])
    monkeypatch.setattr(routers, "AGAIN_S", 0.0)
    made = routers.Routing(lambda: None, told.append)

    def seen(*machines: Machine, desired: Desired = DESIRED) -> int:
        """How often the routers were told, after this look."""
        made.look(desired, Listing(machines, frozenset()))
        for thread in threading.enumerate():
            if thread.name == "routing":
                thread.join(30)
        return len(calls)

    seen.told, seen.fails = told, fails
    return seen


def test_routers_are_told_of_what_has_come_and_not_of_what_is_only_gone(routing):
    assert routing(ZERO) == 0, "its router is not ready"
    assert routing(DOOR) == 0, "there is nothing to lead to"
    assert routing(DOOR, ZERO) == routing(DOOR, ZERO) == 1
    assert routing(DOOR, ZERO, ONE) == 2
    assert routing(DOOR, ONE) == 2, "what is gone may come back"
    elsewhere = replace(ZERO, workers=(Worker("10.0.0.7", None),))
    assert routing(DOOR, elsewhere, ONE) == 3, "it is another machine of that name"
    assert routing(replace(DOOR, created=2.0), elsewhere, ONE) == 4, "a new router knows nothing"
    assert routing(DOOR, ZERO, desired=replace(DESIRED, down="requested")) == 4
    assert routing(ZERO, ONE, desired=replace(DESIRED, pools=DESIRED.pools[:1])) == 4


def test_a_router_that_does_not_answer_is_told_again(routing):
    routing.fails.append(Unreachable("f-door/0 does not answer"))
    assert routing(DOOR, ZERO) == 1 and routing.told == ["the routers: f-door/0 does not answer; tried again"]
    assert routing(DOOR, ZERO) == routing(DOOR, ZERO) == 2
