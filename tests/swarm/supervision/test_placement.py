"""Aggregators on machines with room for them: who gets which, and what happens when one is lost."""

import socket
import threading
from dataclasses import replace

import pytest

from tests.swarm.supervision.fake_cluster import PLAN, SWARM, rounds
from tpuswarm.errors import InputError
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.processes.run_plan import code_digest
from tpuswarm.swarm.supervision import entry, placement
from tpuswarm.swarm.supervision.placement import choose_move, choose_node

URL = "gs://bucket/run"
THREE = replace(PLAN, swarm=replace(SWARM, fragments=3, expected=47))
"""Has three aggregators."""


@pytest.fixture
def in_bucket(monkeypatch):
    monkeypatch.setattr(placement, "origin", lambda folder: URL)


def where(cluster) -> list[str | None]:
    return [cluster.newest(f"aggregator-{number}").node for number in range(3)]


@pytest.mark.parametrize(
    ("rooms", "nodes", "chosen", "moved"),
    [
        ([], [None, None, None], None, None),
        (["a"], [None, "a", None], "a", "0"),
        (["a", "b"], ["a", "a", "b"], "b", None),
        (["a", "b"], ["a", "a", "a"], "b", "0"),
        (["a", "b"], ["b", "b", None], "a", "2"),
        (["a"], ["lost", "lost", "a"], "a", None),
    ],
)
def test_machines_with_room_share_the_aggregators(rooms, nodes, chosen, moved):
    assert choose_node(rooms, nodes) == chosen
    assert choose_move(rooms, dict(zip("012", nodes, strict=True))) == moved


def test_aggregators_move_to_machines_one_at_a_time_and_away_from_a_lost_one(in_bucket, supervise):
    def script(supervisor, cluster):
        yield from rounds(2)
        assert where(cluster) == [None] * 3 and cluster.newest("aggregator-0").store != URL
        cluster.rooms = {"n1": "one", "n2": "two"}
        before = len(cluster.started)
        for count in (1, 2, 3):
            yield
            assert len(cluster.started) - before == count
        assert sorted(where(cluster)) == ["n1", "n1", "n2"] and cluster.newest("aggregator-0").store == URL
        status = supervisor.status
        assert "aggregator-0" not in status.processes, "its pid is another machine's"
        assert sorted(status.aggregators.values()) == ["one", "one", "two"]

        lost = [cluster.newest(f"aggregator-{number}") for number in range(3) if where(cluster)[number] == "n1"]
        for process in lost:  # Ray lists their machine a little longer
            process.die()
        yield from rounds(2)
        assert where(cluster) == ["n2"] * 3
        cluster.newest("aggregator-1").ended = Outcome("left", "")
        yield from rounds(2)
        assert where(cluster) == ["n2", None, "n2"] and cluster.newest("aggregator-1").store != URL

    supervise.finished(script, THREE)
    told = [event["message"] for event in supervise.events("shard")]
    assert told.count("starting on one") == 2 and told.count("it died (one); moving it") == 2
    assert "the machine leaves (two); moving it" in told and told[-1] == "starting on the head"


def test_machine_that_cannot_run_aggregators_does_not_end_the_run(in_bucket, supervise):
    """It gets none for a while; the head has to do without it."""

    def script(supervisor, cluster):
        yield from rounds(2)
        cluster.rooms = {"n1": "one"}
        for _ in range(20):
            yield from rounds(2)
            newest = cluster.newest("aggregator-0")
            if newest.node and not newest.ended:
                newest.ended = Outcome("wrong", "it has other versions")
                cluster.rooms = {"n2": "one"}  # it rejoins as another node
        assert newest.node is None and [node for node, _ in cluster.dismissed] == ["n1"]

    supervise.finished(script)
    assert {event["message"] for event in supervise.events("shard")} == {
        "starting on one", "it has other versions (one); moving it", "starting on the head",
    }  # fmt: skip


def test_run_in_a_folder_keeps_its_aggregators_and_says_so(supervise):
    def script(supervisor, cluster):
        cluster.rooms, cluster.nodes = {"n1": "one", "n2": "two"}, {"n2": "two"}
        yield from rounds(3)
        assert where(cluster) == [None] * 3
        assert cluster.dismissed == [("n1", Outcome("wrong", placement.NEEDS_BUCKET))], "the other has a member"

    supervise.finished(script, THREE)
    told = [event["message"] for event in supervise.events("note") if "room for aggregators" in event["message"]]
    assert sorted(told) == [f"{name} has room for aggregators, but {placement.NEEDS_BUCKET}" for name in ("one", "two")]


def test_aggregator_ends_when_its_machine_leaves_and_stays_on_the_head(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path))
    ended_here, elsewhere = (tmp_path / "aggregators" / f"{name}-0" for name in (socket.gethostname(), "other"))
    ended_here.mkdir(parents=True), elsewhere.mkdir()
    for store, ends in ((URL, True), (str(tmp_path), False)):
        work, ended = entry.shard(store, "", 0, 1, lambda call: None, code_digest()), []
        thread = threading.Thread(target=lambda: ended.append(work.run()), daemon=True)  # noqa: B023
        thread.start()
        work.leave()
        thread.join(60 if ends else 0.1)
        assert ended == ["left"] * ends
    assert not ended_here.exists(), "the copies of a process that was killed stay"
    assert elsewhere.exists(), "copies of another machine with the same home folder are gone"


def test_machine_with_other_code_runs_no_aggregator():
    with pytest.raises(InputError, match="other versions"):
        entry.shard(URL, "", 0, 1, lambda call: None, "other")
