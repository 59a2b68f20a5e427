"""Firewall rules that a fleet needs, and those it refuses because they admit strangers."""

import pytest

from tpuswarm.cloud.google.firewall import (
    Rule,
    fleet_rules,
    head_tag,
    listening_rule,
    opens_all_ports,
    opens_port,
    rule_from_firewall,
    rules_open_to_strangers,
)

NET, TAG = "tpuswarm-mine", "tpuswarm-mine"
OURS = fleet_rules(NET, TAG, "fleet f1e2")


def rest(**fields) -> dict:
    """Return a rule as Compute Engine shows it."""
    shown = {"name": "r", "network": f"https://x/compute/v1/projects/p/global/networks/{NET}", "direction": "INGRESS"}
    return shown | {"allowed": [{"IPProtocol": "tcp"}], "disabled": False} | fields


def test_fleet_rules_join_its_machines_and_admit_nobody_else():
    assert opens_all_ports(OURS, NET, [TAG])
    assert rules_open_to_strangers(OURS, NET, [TAG]) == []
    assert not opens_all_ports(OURS[1:], NET, [TAG]), "ssh alone does not join them"
    assert not opens_all_ports(OURS, "default", [TAG]), "they are another network's"
    assert not opens_all_ports(OURS, NET, ["other"]), "they are other machines'"


def test_listening_rule_opens_one_port_of_the_head_alone():
    rules = [*OURS, listening_rule("mine", NET)]
    assert [rule.gcloud("p").split("--")[3:5] for rule in rules[-1:]] == [
        ["allow=tcp:8443 ", "source-ranges=0.0.0.0/0 "]
    ]
    assert opens_port(rules, NET, [TAG, head_tag("mine")], 8443) and not opens_port(OURS, NET, [head_tag("mine")], 8443)
    assert not opens_port(rules, NET, [TAG], 8443), "not of other machines"
    assert rules_open_to_strangers(rules, NET, [TAG]) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        # Two common rules: everything to everyone, and Google's own in a default network.
        ({"name": "allow-all", "allowed": [{"IPProtocol": "all"}], "sourceRanges": ["0.0.0.0/0"]}, "every port"),
        ({"allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}], "sourceRanges": ["10.128.0.0/9"]}, "0-65535"),
        ({"allowed": [{"IPProtocol": "tcp", "ports": ["22", "88"]}], "sourceRanges": ["1.2.3.4/32"]}, "TCP port 88"),
        ({"sourceTags": ["others"], "targetTags": [TAG]}, "tag others"),
        ({"sourceTags": [TAG, "others"], "targetTags": [TAG]}, "tag others in"),
        ({"sourceServiceAccounts": ["a@p.iam"]}, "a@p.iam"),
        ({"allowed": [{"IPProtocol": "6"}], "sourceRanges": ["0.0.0.0/0"]}, "every port"),
    ],
)
def test_rules_that_admit_strangers_are_named(fields, words):
    rule = rule_from_firewall(rest(**fields))
    ((found, sentence),) = rules_open_to_strangers([*OURS, rule], NET, [TAG])
    assert found == rule and words in sentence and sentence.startswith(f"firewall rule {rule.name} lets ")


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed": [{"IPProtocol": "tcp", "ports": ["22"]}], "sourceRanges": ["0.0.0.0/0"]},
        {"allowed": [{"IPProtocol": "icmp"}], "sourceRanges": ["0.0.0.0/0"]},
        {"allowed": [{"IPProtocol": "udp", "ports": ["60000-61000"]}], "sourceRanges": ["0.0.0.0/0"]},
        {"sourceRanges": ["0.0.0.0/0"], "targetTags": ["others"]},
        {"sourceRanges": ["0.0.0.0/0"], "network": "https://x/global/networks/default"},
        {"sourceTags": [TAG]},
    ],
)
def test_harmless_rules_are_accepted(fields):
    assert rules_open_to_strangers([rule_from_firewall(rest(**fields))], NET, [TAG]) == []


@pytest.mark.parametrize(
    "fields",
    [{"disabled": True}, {"direction": "EGRESS"}, {"allowed": [], "denied": [{"IPProtocol": "all"}]}],
)
def test_rules_that_open_nothing_are_ignored(fields):
    assert rule_from_firewall(rest(sourceRanges=["0.0.0.0/0"], **fields)) is None


def test_gcloud_command_that_makes_a_rule():
    inside, ssh = OURS
    assert inside.gcloud("p") == (
        "gcloud compute firewall-rules create tpuswarm-mine-inside --project=p --network=tpuswarm-mine --allow=tcp "
        "--source-tags=tpuswarm-mine --target-tags=tpuswarm-mine '--description=fleet f1e2'"
    )
    assert "--allow=tcp:22 --source-ranges=0.0.0.0/0 --target-tags=tpuswarm-mine" in ssh.gcloud("p")
    several = Rule("r", NET, (("tcp", ("1", "2")), ("icmp", ())), ("10.0.0.0/8",), (), (TAG,))
    assert "--allow=tcp:1,tcp:2,icmp" in several.gcloud("p")
