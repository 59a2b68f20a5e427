"""The end of a fleet whose keeper lives on a machine of its own."""

from dataclasses import replace

from tests.fleet.cloud_model import Cloud
from tests.fleet.loop import Loop, desired, pool, vm
from tpuswarm.cloud.google.instances import to_instance
from tpuswarm.cloud.protocol import VmSpec
from tpuswarm.fleet.core.actions import Create
from tpuswarm.fleet.core.desired import DownWhen
from tpuswarm.fleet.core.money import MARGIN
from tpuswarm.fleet.core.remember import remember
from tpuswarm.fleet.gcloud import create

A, B = "us-central1-f", "us-central1-b"


def test_the_machine_on_which_the_keeper_lives_goes_last():
    cloud = Cloud()
    loop = Loop(cloud, replace(desired(pool(count=2), vm("head")), kept_on="head"))
    loop.run(600)
    loop.desired = replace(loop.desired, down="asked")
    loop.run(300)
    assert cloud.there == {} and [each.name for each in cloud.deleted][-1] == "gpt2-head"
    loop = Loop(cloud, replace(desired(pool(count=1), vm("head")), kept_on="head"))
    loop.run(600)
    loop.desired = replace(loop.desired, down="asked", pools=(*loop.desired.pools, pool("other", zones=(B,))))
    cloud.unreachable = {B}  # nobody knows whether something is left there
    loop.run(300)
    assert [each.name for each in cloud.there.values()] == ["gpt2-head"]
    cloud.unreachable = set()
    loop.run(300)
    assert cloud.there == {}


def test_whoever_watches_a_fleet_come_down_calls_nothing_lost():
    cloud = Cloud()
    loop = Loop(cloud, desired(pool(count=2), pool("other")))
    loop.run(600)
    watched, loop.desired = loop.memory, replace(loop.desired, down="asked")
    told = []
    for _ in range(30):
        loop.run(0)
        watched, events = remember(watched, loop.desired, loop.listing, [], loop.now)
        told += events
    assert cloud.there == {} and sorted((each.kind, each.text) for each in told) == [("gone", "it is deleted")] * 3


def test_a_vm_ends_by_itself_after_the_date_where_nobody_keeps_the_fleet():
    cloud = Cloud()
    loop = Loop(cloud, replace(desired(pool(), vm("head")), down_when=DownWhen(at=cloud.now + 4000)))
    loop.run(60)
    specs = [each.spec for each in loop.actions if isinstance(each, Create)]
    (head,) = [each for each in specs if isinstance(each, VmSpec)]
    assert head.ends == loop.desired.down_when.at + MARGIN
    scheduling = to_instance(head, "my-project").scheduling
    assert scheduling.termination_time == "2027-01-15T09:16:40+00:00"
    assert scheduling.instance_termination_action == "DELETE"
    assert "--termination-time=2027-01-15T09:16:40+00:00" in create(head, "my-project")
