"""Machines that join a run, leave and return, as the supervisor sees them."""

from dataclasses import replace

from tests.swarm.supervision.fake_cluster import PLAN, SWARM, rounds, states
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.processes.plan import HEAD
from tpuswarm.swarm.storage.objects import checked_member
from tpuswarm.swarm.supervision import kept as kept_module
from tpuswarm.swarm.supervision.kept import guest_name


def test_machine_that_returns_is_the_same_member(supervise):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu 7", "n2": "tpu-8"}
        yield from rounds(2)
        assert states(supervisor) == {"j-tpu-7": "joining", "j-tpu-8": "joining"}
        cluster.newest("j-tpu-7").lease("a")
        yield from rounds(2)
        assert states(supervisor)["j-tpu-7"] == "alive"
        for node in ("n3", "n4", "n5"):  # preempted again and again
            cluster.remove("tpu 7")
            yield from rounds(3)
            assert states(supervisor) == {"j-tpu-7": "lost", "j-tpu-8": "joining"}
            assert [each.tokens_per_s for each in supervisor.status.members if each.state == "lost"] == [None]
            cluster.nodes[node] = "tpu 7"
            yield from rounds(2)
            assert states(supervisor) == {"j-tpu-7": "joining", "j-tpu-8": "joining"}
            assert cluster.newest("j-tpu-7").node == node
        cluster.finish()

    assert supervise(script).how == "finished"
    lost = supervise.events("lost")
    assert [(event["member"], event["own_machine"]) for event in lost] == [("j-tpu-7", True)] * 3


def test_members_on_one_machine_have_names_of_their_own(supervise):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu", "n2": "tpu", "n3": "tpu"}
        yield from rounds(5)  # the second gets its name when the first has answered
        assert list(states(supervisor)) == ["j-tpu", "j-tpu-2", "j-tpu-3"]
        cluster.newest("j-tpu-2").ended = Outcome("left", "")
        yield from rounds(2)
        assert states(supervisor)["j-tpu-2"] == "left"
        cluster.nodes["n4"] = "tpu"  # it joins again before Ray has dropped its first node
        yield from rounds(2)
        assert cluster.newest("j-tpu-2").node == "n4" and not cluster.newest("j-tpu-2").gone
        assert list(states(supervisor).items()) == [(name, "joining") for name in ("j-tpu", "j-tpu-2", "j-tpu-3")]
        assert len([process for process in cluster.started if process.name[0] == "j"]) == 4
        cluster.finish()

    assert supervise(script).how == "finished"


def test_machine_that_returns_before_its_process_is_known_to_be_dead(supervise):
    """Ray may list the machine's new node before it reports the death of the process on the old one."""

    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield from rounds(2)
        first = cluster.newest("j-tpu")
        cluster.nodes = {"n2": "tpu"}
        yield from rounds(2)
        assert cluster.newest("j-tpu") is first  # two processes would be one member
        first.die("its node died")
        yield from rounds(2)
        assert cluster.newest("j-tpu").node == "n2" and list(states(supervisor)) == ["j-tpu"]
        cluster.finish()

    assert supervise(script).how == "finished" and len(supervise.events("lost")) == 1


def test_machine_that_returns_before_its_node_is_known_to_be_gone(supervise):
    """Its process is started again on the old node, in vain: Ray lists that node for 10 s more."""

    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield from rounds(2)
        cluster.newest("j-tpu").die()
        cluster.is_silent = True
        yield
        cluster.nodes = {"n1": "tpu", "n2": "tpu"}
        for _ in range(3):
            yield
            assert list(states(supervisor)) == ["j-tpu"]
        assert cluster.newest("j-tpu").node == "n1"
        cluster.is_silent = False
        cluster.remove("tpu")
        yield from rounds(3)
        assert cluster.newest("j-tpu").node == "n2" and list(states(supervisor)) == ["j-tpu"]
        cluster.finish()

    assert supervise(script).how == "finished" and len(supervise.events("lost")) == 1


def test_another_member_evaluates_once_the_evaluating_machine_has_left(supervise):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "first", "n2": "second"}
        yield from rounds(2)
        assert cluster.newest("j-first").evaluates and not cluster.newest("j-second").evaluates
        for name in ("j-first", "j-second"):  # killed, but their machines stay: the same one evaluates
            cluster.newest(name).die()
            yield from rounds(3)
            assert cluster.newest(name).evaluates == (name == "j-first")
        cluster.remove("first")
        yield from rounds(3)
        cluster.newest("j-second").die()
        yield from rounds(3)
        assert cluster.newest("j-second").evaluates
        cluster.newest(HEAD).ended = cluster.newest("j-second").ended = Outcome("ended", "")

    assert supervise(script, replace(PLAN, swarm=replace(SWARM, members=0))).how == "finished"


def test_silent_machine_without_a_lease_is_lost(supervise, monkeypatch):
    def script(supervisor, cluster):
        cluster.nodes = {"n1": "tpu"}
        yield
        guest = cluster.newest("j-tpu")
        guest.lease("c")
        yield from rounds(2)
        assert states(supervisor) == {"j-tpu": "alive"}
        guest.answers, cluster.leased = False, ()
        yield from rounds(2)
        assert states(supervisor) == {"j-tpu": "joining"}
        monkeypatch.setattr(kept_module, "SILENT", 0.0)
        yield
        assert states(supervisor) == {"j-tpu": "lost"}
        assert supervisor.status.members[0].state == "joining"  # one on this machine: its end is noticed at once
        cluster.finish()
        guest.die("its node died")

    assert supervise(script).how == "finished"


def test_names_of_machines_are_made_safe():
    for host in ("t1v-n-0a1b-w-0", "büro/../ rechner", "x" * 300, "", ".."):
        taken = set()
        for _ in range(21):
            name = guest_name(host, taken)
            assert checked_member(name) == name and name.startswith("j-") and name not in taken
            taken.add(name)
    assert guest_name("a", {"j-a", "j-a-2"}) == "j-a-3" and guest_name("a-2", {"j-a-2"}) == "j-a-2-2"
