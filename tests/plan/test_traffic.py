from dataclasses import replace

import pytest
from benchmarks.traffic import MEMBER_COUNT, Swarm

from tpuswarm import catalog
from tpuswarm.config.units import GIB
from tpuswarm.plan.head import head_machines, network_load, size_head
from tpuswarm.plan.traffic import DAY_S, Exchange, member_traffic, traffic_bills
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import default_request

GPT2_124M = Exchange(124_475_904, step_seconds=1.0, cycle=100, form="int8")


@pytest.mark.long
def test_real_swarm_sends_and_receives_as_predicted(devices):
    """Four members with real programs, counted at the member; pushes at the end of the run are for shorter cycles."""
    recipe = GPT2(data="fake", layers=1, heads=1, width=64, context=16)
    swarm = Swarm(recipe, compile_step(recipe, default_request(recipe), devices[:1]), "int8", 5, 4)
    swarm.run()
    steps = swarm._tokens / (swarm.terms.batch * swarm.terms.tokens_per_row) / MEMBER_COUNT
    predicted = member_traffic(Exchange(swarm.parameters, step_seconds=1.0, cycle=5, form="int8"))
    share = MEMBER_COUNT * steps / DAY_S
    sent, received = swarm.sent["put"], swarm.received["updates"] + swarm.received["fetch"]
    assert sent == pytest.approx(predicted.sent["contributions"] * share, rel=0.25)
    assert received == pytest.approx(predicted.received["versions"] * share, rel=0.1)


@pytest.mark.parametrize(
    ("place", "nearby"),
    [("us-central1-a", 0.02), ("us-central2-b", 0.02), ("europe-west4-a", 0.02), ("asia-northeast1-b", 0.08)],
)
def test_paid_traffic_by_distance(place, nearby):
    """GPT-2 124M: 864 exchanges of 0.118 GiB a day, and data. No source has the price of data of another continent."""
    member = member_traffic(replace(GPT2_124M, data_bytes=2 * 65_536))
    assert member.sent["contributions"] / GIB == pytest.approx(864 * 124_475_904 * (1 + 1 / 64) / GIB)
    assert member.data == 65_536 * 2 * DAY_S
    found = {bill.relation: bill for bill in traffic_bills(member, place)}
    assert list(found) == ["same zone", "same region", "same continent", "other continent", "internet"]
    down, up = sum(member.received.values()) / GIB, sum(member.sent.values()) / GIB
    for relation, price, read in (
        ("same zone", 0.0, 0.0),
        ("same region", 0.01, 0.0),
        ("same continent", nearby, 0.02),
        ("other continent", 0.08, None),
    ):
        data = None if read is None else pytest.approx(read * member.data / GIB)
        assert found[relation].parts == {"exchange": pytest.approx(price * (up + down)), "data": data}, relation
    assert found["internet"].parts == {"exchange": pytest.approx(0.12 * up), "data": 0.0}


def test_member_with_local_data_pays_for_no_reads():
    [_, _, _, far, _] = traffic_bills(member_traffic(GPT2_124M), "europe-west4-a")
    assert far.data == 0.0 and far.exchange > 0
    [_, _, near, far, _] = traffic_bills(member_traffic(GPT2_124M), "me-west1-a")
    assert near.exchange is None and far.exchange > 0


def test_network_of_the_head_and_of_aggregators_elsewhere():
    """100 members of 1.5 B: 7 aggregators; each payload arrives once, and goes to the bucket and back as a version."""
    exchange = Exchange(1_557_611_200, step_seconds=300.0, cycle=1)
    load = network_load(100, exchange, "average")
    payload = 4 * 1_557_611_200 * 8 / 300 / 1e9
    assert (load.aggregators, load.fragments % 7) == (7, 0)
    assert load.aggregator.received == pytest.approx(100 * payload / 7)
    assert load.aggregator.sent == pytest.approx((200 + 1) * payload / 7)
    assert load.head.received == pytest.approx(100 * payload, rel=1e-3) and load.head_alone.received < 0.002
    smaller = network_load(100, replace(exchange, form="int4"), "average")
    assert smaller.aggregator.received == pytest.approx(load.aggregator.received * (1 / 8 + 1 / 256))
    alone = network_load(1, replace(exchange, elements=10), "average")
    assert (alone.aggregators, alone.fragments) == (1, 1)


def test_head_grows_with_its_swarm_and_runs_where_it_has_room():
    slice_ = catalog.find("v3-8")
    member = member_traffic(GPT2_124M)
    small, large = (size_head(members, GPT2_124M, member, "nesterov") for members in (4, 400))
    assert small.memory_bytes < 16 * GIB < large.memory_bytes and small.cores == 2 < large.cores
    assert large.mbit_in == pytest.approx(100 * small.mbit_in)
    state = 4 * 124_475_904  # without momentum and buffers
    assert small.disk_bytes > 20 * 4 * state and small.disk_bytes_a_day > 864 / 50 * state
    found = head_machines(small, slice_, GPT2_124M, "us-central1-a")
    assert found[0].own and found[0].name == "a host of v3-8"
    prices = [holder.price.on_demand for holder in found[1:]]
    assert prices == sorted(prices) and len(prices) == 3
    by_name = {machine.name: machine for machine in catalog.machines()}
    assert all(by_name[holder.name].memory_gib * GIB >= small.memory_bytes for holder in found[1:])
    busy = replace(small, cores=96)  # a member needs some of the 96
    assert not any(holder.own for holder in head_machines(busy, slice_, GPT2_124M, "us-central1-a"))
    assert not found[0].network_known  # no source says what network a v3-8 has; of a v6e-1, 100 Gbit/s
    [known, *_] = head_machines(small, catalog.find("v6e-1"), GPT2_124M, "us-central1-b")
    assert known.own and known.network_known
    flooded = replace(small, mbit_out=60_000.0)
    assert not any(holder.own for holder in head_machines(flooded, catalog.find("v6e-1"), GPT2_124M, "us-central1-b"))
    huge = size_head(4000, GPT2_124M, member, "nesterov")
    assert not any(holder.own for holder in head_machines(huge, slice_, GPT2_124M, "us-central1-a"))
