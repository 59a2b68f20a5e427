"""Machines that join a run, go and come back, as the supervisor sees them; the cluster is played."""

from dataclasses import replace

from tests.swarm.supervision.played import PLAN, SWARM, Cluster, finish, states
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.processes.plan import HEAD
from tpuswarm.swarm.storage.objects import checked_member
from tpuswarm.swarm.supervision import kept as kept_module
from tpuswarm.swarm.supervision.kept import guest_name


def test_a_machine_that_comes_back_is_the_same_member(play):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu 7", "n2": "tpu-8"}
        yield
        yield
        assert states(supervisor) == {"j-tpu-7": "joining", "j-tpu-8": "joining"}
        first = cluster.newest("j-tpu-7")
        first.incarnation = "a" * 32
        Cluster.leased = (first.incarnation,)
        yield
        yield
        assert states(supervisor)["j-tpu-7"] == "alive"
        for node in ("n3", "n4", "n5"):  # preempted again and again
            cluster.newest("j-tpu-7").ended = Outcome("dead", "its node died")
            del cluster.nodes[next(each for each, host in cluster.nodes.items() if host == "tpu 7")]
            Cluster.leased = ()
            yield
            yield
            yield
            assert states(supervisor) == {"j-tpu-7": "lost", "j-tpu-8": "joining"}
            assert all(each.tokens_per_s is None for each in supervisor.status.members if each.state == "lost")
            cluster.nodes[node] = "tpu 7"
            yield
            yield
            assert states(supervisor) == {"j-tpu-7": "joining", "j-tpu-8": "joining"}
            assert cluster.newest("j-tpu-7").node == node
        finish(cluster)

    assert play(script).how == "finished"
    lost = play.events("lost")
    assert [each["member"] for each in lost] == ["j-tpu-7"] * 3 and all(each["own_machine"] for each in lost)


def test_two_members_on_one_machine_have_two_names(play):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu", "n2": "tpu", "n3": "tpu"}
        for _ in range(5):  # the second is named when the first has answered
            yield
        assert list(states(supervisor)) == ["j-tpu", "j-tpu-2", "j-tpu-3"]
        cluster.newest("j-tpu-2").ended = Outcome("left", "")
        yield
        yield
        assert states(supervisor)["j-tpu-2"] == "left"
        cluster.nodes["n4"] = "tpu"  # it is given `join` again before the node of its first life is gone
        yield
        yield
        assert cluster.newest("j-tpu-2").node == "n4" and not cluster.newest("j-tpu-2").gone
        assert list(states(supervisor).items()) == [(each, "joining") for each in ("j-tpu", "j-tpu-2", "j-tpu-3")]
        assert len([each for each in cluster.started if each.name[0] == "j"]) == 4
        finish(cluster)

    assert play(script).how == "finished"


def test_back_before_its_end_was_noticed(play):
    """Ray has another node of that machine before it says that the process on the first one is dead."""

    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield
        yield
        first = cluster.newest("j-tpu")
        cluster.nodes = {"n2": "tpu"}
        yield
        yield
        assert cluster.newest("j-tpu") is first  # two processes would be one member
        first.ended = Outcome("dead", "its node died")
        yield
        yield
        assert cluster.newest("j-tpu").node == "n2" and list(states(supervisor)) == ["j-tpu"]
        finish(cluster)

    assert play(script).how == "finished" and len(play.events("lost")) == 1


def test_back_before_its_node_is_known_to_be_gone(play):
    """Its process is known to be dead at once, and made again there in vain; Ray lists the node for 10 s."""

    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield
        yield
        cluster.newest("j-tpu").ended = Outcome("dead", "killed")
        cluster.silent = True
        yield
        cluster.nodes = {"n1": "tpu", "n2": "tpu"}
        for _ in range(3):
            yield
            assert list(states(supervisor)) == ["j-tpu"]
        assert cluster.newest("j-tpu").node == "n1"
        cluster.newest("j-tpu").ended = Outcome("dead", "its node died")
        del cluster.nodes["n1"]
        cluster.silent = False
        yield
        yield
        yield
        assert cluster.newest("j-tpu").node == "n2" and list(states(supervisor)) == ["j-tpu"]
        finish(cluster)

    assert play(script).how == "finished" and len(play.events("lost")) == 1


def test_another_one_evaluates_where_the_machine_that_did_has_left(play):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "first", "n2": "second"}
        yield
        yield
        assert cluster.newest("j-first").evaluates and not cluster.newest("j-second").evaluates
        for name in ("j-first", "j-second"):  # both are killed: who evaluates may come back, so it stays that one
            cluster.newest(name).ended = Outcome("dead", "killed")
            yield
            yield
            yield
            assert cluster.newest(name).evaluates == (name == "j-first")
        cluster.newest("j-first").ended = Outcome("dead", "its node died")
        del cluster.nodes["n1"]
        yield
        yield
        yield
        cluster.newest("j-second").ended = Outcome("dead", "killed")
        yield
        yield
        yield
        assert cluster.newest("j-second").evaluates
        cluster.newest(HEAD).ended = cluster.newest("j-second").ended = Outcome("ended", "")

    nobody = replace(PLAN, swarm=replace(SWARM, members=0))
    assert play(script, nobody).how == "finished"


def test_a_machine_that_is_silent_and_has_no_lease_is_lost(play, monkeypatch):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield
        guest = cluster.newest("j-tpu")
        guest.incarnation = "c" * 32
        Cluster.leased = (guest.incarnation,)
        yield
        yield
        assert states(supervisor) == {"j-tpu": "alive"}
        guest.answers, Cluster.leased = False, ()
        yield
        yield
        assert states(supervisor) == {"j-tpu": "joining"}
        monkeypatch.setattr(kept_module, "SILENT", 0.0)
        yield
        assert states(supervisor) == {"j-tpu": "lost"}
        assert supervisor.status.members[0].state == "joining"  # one on this machine: its end is noticed at once
        finish(cluster)
        guest.ended = Outcome("dead", "its node died")

    assert play(script).how == "finished"


def test_names_of_machines_are_made_safe():
    for host in ("t1v-n-0a1b-w-0", "büro/../ rechner", "x" * 300, "", ".."):
        name = guest_name(host, ())
        assert checked_member(name) == name and name.startswith("j-")
        taken = {name}
        for _ in range(20):
            taken.add(checked_member(guest_name(host, taken)))
        assert len(taken) == 21
    assert guest_name("a", {"j-a", "j-a-2"}) == "j-a-3" and guest_name("a-2", {"j-a-2"}) == "j-a-2-2"
