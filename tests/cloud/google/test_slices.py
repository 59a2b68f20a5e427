"""What slices, their metadata and a network become when Compute Engine answers late, in part or not at all."""

import time
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from tests.cloud.google.conftest import spec
from tpuswarm.cloud.errors import Changed, Invalid, NoQuota, Unreachable
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.google.project import Project
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.google.slices import NEW_S, Slices
from tpuswarm.cloud.protocol import REMAINS, Machine, Worker

ZONE, REGION = "us-east5-a", "us-east5"
LABELS = {"tpuswarm-slice": "s", "tpuswarm-zone": ZONE, "tpuswarm-type": "v6e-16"}
LABELS |= {"tpuswarm-fleet": "f1e2", "tpuswarm-pool": "small"}
HOSTED = Machine("s", ZONE, "tpu", "v6e-16", "ready", "RUNNING", api="compute")
SLICE = spec("s", ZONE, "v6e-16", "spot", api="compute")
HOSTS = [
    {
        "name": f"s-{n}",
        "zone": f"zones/{ZONE}",
        "status": "RUNNING",
        "machineType": "ct6e-standard-4t",
        "labels": LABELS,
    }
    for n in range(4)
]
DONE = {"name": "operation", "status": "DONE", "zone": f"zones/{ZONE}"}
QUOTA = {"error": {"errors": [{"code": "QUOTA_EXCEEDED", "message": "Quota 'TPUS' exceeded."}]}}
NO_CAPACITY = {"error": {"errors": [{"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": "no capacity"}]}}
SPOT, FLEX = {"preemptible": True}, {"provisioningModel": "FLEX_START"}


class Answering(Access):
    """A project whose REST calls get the first answer that fits: {part of "METHOD URL": answer or error}."""

    def __init__(self, answers):
        super().__init__("p", Endpoints("", "http://cloud", "token"))
        changed = {"POST": DONE, "DELETE": DONE, "/operations/": DONE}
        self.answers, self.changes = [*answers.items(), *changed.items()], []

    def rest(self, method, url, query, **body):
        if method != "GET":
            self.changes.append(f"{method} {url}")
        answer = next((answer for part, answer in self.answers if part in f"{method} {url}"), {})
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(json=lambda: answer)


def in_scope(kind, scope, *resources):
    return {f"aggregated/{kind}": {"items": {scope: {kind: list(resources)}}}}


def listing(scheduling, age_s, group, hosts):
    """List a project with a template of this age, perhaps its group, and hosts."""
    made = datetime.fromtimestamp(time.time() - age_s, UTC).isoformat()
    properties = {"labels": LABELS, "scheduling": scheduling}
    template = {"name": "s", "creationTimestamp": made, "properties": properties}
    groups = [] if group is None else [{"name": "s", "zone": f"zones/{ZONE}", "targetSize": 4, **group}]
    answers = in_scope("instanceTemplates", f"regions/{REGION}", template)
    answers |= in_scope("instanceGroupManagers", f"zones/{ZONE}", *groups)
    return GoogleProvider(Answering(answers | in_scope("instances", f"zones/{ZONE}", *hosts))).machines([])


def test_region_whose_templates_do_not_answer_is_unknown_not_empty():
    silent = {"items": {f"regions/{REGION}": {"warning": {"code": "UNREACHABLE"}}}}
    provider = GoogleProvider(Answering({"aggregated/instanceTemplates": silent}))
    assert {f"{REGION}-b", f"{REGION}-c"} <= provider.machines([f"{REGION}-b", f"{REGION}-c", "us-west1-a"]).unreachable
    assert "us-west1-a" not in provider.machines(["us-west1-a"]).unreachable
    answers = {"aggregated/instanceTemplates": silent, **in_scope("instances", f"zones/{ZONE}", *HOSTS)}
    assert ZONE in GoogleProvider(Answering(answers)).machines([]).unreachable, "it has hosts"


def test_hosts_without_a_template_are_a_machine_that_can_be_deleted():
    access = Answering(in_scope("instances", f"zones/{ZONE}", *HOSTS))
    (machine,) = GoogleProvider(access).machines([]).machines
    assert (machine.name, machine.zone, machine.type, machine.state) == ("s", ZONE, "v6e-16", "ready")
    assert (machine.fleet, machine.pool, len(machine.workers)) == ("f1e2", "small", 4)
    GoogleProvider(access).delete(machine)
    assert access.changes == [f"DELETE http://cloud/compute/v1/projects/p/zones/{ZONE}/instanceGroupManagers/s"]


STABLE, CREATING = {"status": {"isStable": True}}, {"currentActions": {"creating": 4}}


@pytest.mark.parametrize(
    ("scheduling", "age_s", "group", "hosts", "state"),
    [
        (SPOT, NEW_S + 60, STABLE, [], "dead"),
        (SPOT, NEW_S - 60, STABLE, [], "creating"),
        (FLEX, NEW_S + 60, STABLE, [], "dead"),
        (FLEX, NEW_S - 60, STABLE, [], "waiting"),
        (FLEX, 1e7, {"status": {"isStable": False}}, [], "waiting"),
        (FLEX, 1e7, {**STABLE, **CREATING}, [], "waiting"),
        (FLEX, 1e7, {"status": {"isStable": True, "bulkInstanceOperation": {"inProgress": True}}}, [], "waiting"),
        (FLEX, 1e7, {"status": {"bulkInstanceOperation": {"lastProgressCheck": NO_CAPACITY}}}, [], "waiting"),
        (FLEX, 1e7, {"status": {"bulkInstanceOperation": {"lastProgressCheck": QUOTA}}}, [], "dead"),
        (FLEX, 1e7, STABLE, HOSTS[:3], "dead"),
        (FLEX, 1e7, STABLE, HOSTS, "ready"),
        (FLEX, 1e7, None, HOSTS, "ready"),
        (SPOT, 1e7, None, HOSTS, "ready"),
        (SPOT, 1e7, None, [], "dead"),
        (SPOT, NEW_S - 60, None, [], "creating"),
    ],
)
def test_state_of_a_slice_is_what_its_group_and_hosts_say(scheduling, age_s, group, hosts, state):
    (machine,) = listing(scheduling, age_s, group, hosts).machines
    assert machine.state == state
    assert (machine.said == REMAINS) == (group is None and not hosts), "only what has no hosts is remains"
    if group and "QUOTA" in str(group):
        assert isinstance(machine.error, NoQuota)


GROUP_CREATION = f"POST http://cloud/compute/v1/projects/p/zones/{ZONE}"


def test_lost_answer_to_a_creation_deletes_nothing():
    access = Answering({GROUP_CREATION: Unreachable("no answer")})
    with pytest.raises(Unreachable, match="no answer"):
        Slices(access).create(SLICE)
    assert not [call for call in access.changes if call.startswith("DELETE")], "the group may exist"


def test_refused_creation_says_why_though_its_parts_cannot_be_deleted():
    access = Answering({GROUP_CREATION: NoQuota("too many"), "DELETE": Unreachable("no answer")})
    with pytest.raises(NoQuota, match="too many"):
        Slices(access).create(SLICE)


NETWORK = "projects/p/global/networks/tpuswarm-f"


@pytest.mark.parametrize(
    ("machines", "error", "named"),
    [
        (
            in_scope("instances", f"zones/{ZONE}", {"name": "mine", "networkInterfaces": [{"network": NETWORK}]}),
            Invalid,
            "1 machine uses it: mine; delete it",
        ),
        ({"/nodes": {"nodes": [{"name": "nodes/mine", "networkConfig": {"network": NETWORK}}]}}, Invalid, "mine"),
        ({"aggregated/instances": {"unreachables": [f"zones/{ZONE}"]}}, Unreachable, ZONE),
        (in_scope("instances", f"zones/{ZONE}", {"name": "mine", "networkInterfaces": [{"network": "x"}]}), None, ""),
    ],
)
def test_network_keeps_its_firewall_rules_while_machines_are_in_it(machines, error, named):
    rule = {"name": "r", "network": NETWORK, "description": "d", "direction": "INGRESS", "sourceRanges": ["10.0.0.0/8"]}
    rules = {"items": [{**rule, "allowed": [{"IPProtocol": "tcp"}]}]}
    access = Answering({"GET http://cloud/compute/v1/projects/p/global/firewalls": rules, **machines})
    access.answers.insert(0, (f"GET http://cloud/compute/v1/{NETWORK}", {"description": "d"}))
    if error is None:
        assert Project(access).remove_network("tpuswarm-f", "d") == ["r", "tpuswarm-f"]
        return
    with pytest.raises(error, match=named):
        Project(access).remove_network("tpuswarm-f", "d")
    assert not access.changes


def test_metadata_of_a_slice_fails_if_it_fails_on_any_host():
    machine = replace(HOSTED, workers=tuple(Worker(None, None, f"s-{n}") for n in range(4)))
    answers = {"GET http://cloud/compute/v1/projects/p/zones/us-east5-a/instances/": {"metadata": {}}}
    answers |= {f"/s-{n}/setMetadata": {**DONE, "name": f"operation-{n}"} for n in range(4)}
    assert GoogleProvider(Answering(answers)).set_metadata(machine, {"a": "1"}).endswith("/operation-3")
    refused = {"code": "CONDITION_NOT_MET", "message": "The fingerprint does not match."}
    answers["operations/operation-1"] = {**DONE, "targetLink": "instances/s-1", "error": {"errors": [refused]}}
    with pytest.raises(Changed, match="s-1"):
        GoogleProvider(Answering(answers)).set_metadata(machine, {"a": "1"})
