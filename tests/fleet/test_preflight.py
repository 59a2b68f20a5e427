"""Each thing that must be right before the first machine, wrong in turn: what is said, and how to mend it."""

import dataclasses
import datetime
import shlex
from pathlib import Path

import pytest

from tpuswarm.cli import bring
from tpuswarm.cloud.errors import Denied, NoQuota, NotSignedIn, Unreachable
from tpuswarm.cloud.google.firewall import Rule, wanted
from tpuswarm.cloud.google.project import APIS, Subnetwork
from tpuswarm.cloud.google.quotas import Quota
from tpuswarm.config.toml_file import parse_toml
from tpuswarm.config.units import GIB
from tpuswarm.fleet.facts import Facts, Net, nets_of
from tpuswarm.fleet.file import SwarmFile
from tpuswarm.fleet.preflight import Check, checks
from tpuswarm.plan.head import head
from tpuswarm.plan.swarm import Exchanged, traffic

NOW = datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC).timestamp()
ZONE, NET = "us-central1-b", "tpuswarm-mine"
TEXT = f"""
name = "mine"
[storage]
bucket = "mine-bucket"
[[grant]]
type = "v2-8"
zone = "{ZONE}"
how = "spot"
count = 4
[[pool]]
name = "small"
type = "v2-8"
zones = ["{ZONE}"]
count = 4
network = "{NET}"
[head]
type = "n2-highmem-2"
zone = "{ZONE}"
network = "{NET}"
"""
SPOT = "TPUV2sPreemptiblePerProjectPerZoneForTPUAPI"
FACTS = Facts(
    project="my-project",
    apis=frozenset(APIS),
    billing="000000-AAAAAA",
    quotas=(Quota(SPOT, {ZONE: 48}),),
    types={ZONE: ("v2-8", "v3-8")},
    runtimes={ZONE: ("tpu-ubuntu2204-base", "tpu-vm-tf-2.18.0")},
    bucket="us-central1",
    subnetworks={Net(NET, NET, "us-central1"): Subnetwork("10.128.0.0/20", False)},
    rules=wanted(NET, "tpuswarm-mine", "tpuswarm mine"),
    account="1-compute@developer.gserviceaccount.com",
)


def read(text: str) -> SwarmFile:
    return parse_toml(text, Path("swarm.toml"), SwarmFile)


def judged(text: str = TEXT, paid: bool = False, head_bytes: float | None = None, **facts) -> list[Check]:
    file = read(text)
    return checks(file, dataclasses.replace(FACTS, **facts), NOW, paid, head_bytes)


def wrong(**about) -> Check:
    """The one check that is not passed."""
    (only,) = [each for each in judged(**about) if not each.ok]
    return only


def test_where_all_is_right_every_check_says_so():
    found = judged()
    assert all(each.ok and each.sentence and not each.mend for each in found)
    named = {each.id for each in found}
    assert named >= {"credentials", "project", "billing", "apis", "type", "runtime", "bucket", "addresses", "firewall"}
    assert named >= {"account", "price", "quota"}


@pytest.mark.parametrize(
    ("facts", "id_", "sentence", "mend"),
    [
        ({"apis": NotSignedIn("x: expired; y")}, "credentials", "expired", "gcloud auth application-default login"),
        ({"apis": Unreachable("Google Cloud cannot be reached")}, "credentials", "cannot be reached", "network"),
        (
            {"apis": Denied("denied"), "types": {ZONE: Denied("denied")}},
            "project",
            "denied",
            "gcloud projects describe my-project",
        ),
        ({"os_login": True}, "policy", "OS Login on for all machines", "disable-enforce compute.requireOsLogin"),
        ({"billing": None}, "billing", "no billing account", "gcloud billing projects link my-project"),
        (
            {"apis": frozenset(APIS) - {"tpu.googleapis.com"}},
            "apis",
            "Cloud TPU",
            "gcloud services enable tpu.googleapis.com --project=my-project",
        ),
        ({"quotas": (Quota(SPOT, {ZONE: 0}),)}, "quota", f"{ZONE}: 0 ({SPOT})", "project=my-project"),
        ({"quotas": (Quota(SPOT, {ZONE: 16}),)}, "quota", "each takes 8", "set count = 2"),
        ({"types": {ZONE: ("v3-8",)}}, "type", f"{ZONE} offers no v2-8", "europe-west4-a"),
        ({"types": {ZONE: NoQuota("no such zone; take another")}}, "type", "no such zone", "take another"),
        ({"runtimes": {ZONE: ("tpu-vm-cos",)}}, "runtime", "has no runtime tpu-ubuntu2204-base", 'runtime = "'),
        ({"bucket": None}, "bucket", "there is no bucket mine-bucket", "--location=us-central1"),
        ({"bucket": "us-east1"}, "bucket", "costs $0.02", "allow_cross_region = true"),
        (
            {"subnetworks": {Net(NET, NET, "us-central1"): None}},
            "addresses",
            "no addresses",
            "gcloud compute networks subnets create",
        ),
        (
            {"subnetworks": {Net(NET, NET, "us-central1"): Subnetwork("10.0.0.0/29", False)}},
            "addresses",
            "4 addresses (10.0.0.0/29) for 5 hosts",
            "expand-ip-range",
        ),
        ({"rules": ()}, "firewall", "tag tpuswarm-mine", "gcloud compute firewall-rules create tpuswarm-mine-inside"),
        (
            {"rules": (*FACTS.rules, Rule("allow-all", NET, (("all", ()),), ("0.0.0.0/0",)))},
            "firewall",
            "allow-all lets 0.0.0.0/0 in to every port",
            "gcloud compute firewall-rules delete allow-all",
        ),
        ({"account": None}, "account", "no default service account", "gcloud iam service-accounts create"),
    ],
    ids=lambda each: each if isinstance(each, str) and " " not in each else "",
)
def test_a_fact_that_is_wrong(facts, id_, sentence, mend):
    found = wrong(**facts)
    assert (found.id, sentence in found.sentence, mend in found.mend) == (id_, True, True), found


def test_machines_without_an_external_address_need_a_way_to_google():
    file = read(TEXT.replace("count = 4\nnetwork", "count = 4\nexternal_ips = false\nnetwork"))
    (found,) = [each for each in checks(file, FACTS, NOW, False) if not each.ok]
    assert "reach neither buckets nor the TPU service" in found.sentence
    assert found.mend.endswith(
        f"update {NET} --region=us-central1 --project=my-project --enable-private-ip-google-access"
    )
    ways = dict.fromkeys(FACTS.subnetworks, Subnetwork("10.128.0.0/20", True))
    assert all(each.ok for each in checks(file, dataclasses.replace(FACTS, subnetworks=ways), NOW, False))


@pytest.mark.parametrize("fact", ["apis", "billing", "quotas", "account"])
def test_what_a_member_of_a_project_may_not_ask_is_said_and_keeps_nobody_from_creating(fact):
    found = judged(**{fact: Denied("asking: the caller does not have permission; an owner gives it")})
    (unknown,) = [each for each in found if not each.known]
    assert all(each.ok for each in found) and unknown.sentence.startswith("could not be checked: asking: the caller")
    assert {each.id for each in found} >= {"type", "runtime", "bucket", "firewall", "price"}


def test_apis_that_only_tell_something_need_not_be_on():
    off = Denied("asking for quotas: the API cloudquotas.googleapis.com is not on")
    on = frozenset(APIS) - {"cloudquotas.googleapis.com", "cloudbilling.googleapis.com"}
    assert all(each.ok for each in judged(apis=on, quotas=off, billing=off))


@pytest.mark.parametrize(
    ("old", "new", "id_", "words"),
    [
        ('how = "spot"\ncount = 4', 'how = "spot"\ncount = 3', "grants", "no grant covers 1 v2-8 of pool small"),
        ("[[grant]]", "[budget]\nper_hour = 0.01\n[[grant]]", "price", "its budget is $0.01"),
        ("[[pool]]", '[[pool]]\nruntime = "v2-alpha-tpuv6e"', "runtime", "is for v6e, and pool small is of v2-8"),
        (f'network = "{NET}"\n[head]', "[head]", "firewall", "network default"),
    ],
)
def test_a_line_of_the_file_that_is_wrong(old, new, id_, words):
    found = wrong(text=TEXT.replace(old, new))
    assert (found.id, words in found.sentence) == (id_, True) and found.mend, found


def test_a_machine_alone_needs_no_rules():
    text = TEXT[: TEXT.index("[head]")].replace("count = 4\nnetwork", "count = 1\nnetwork")
    allow_all = Rule("allow-all", NET, (("all", ()),), ("0.0.0.0/0",))
    assert all(each.ok for each in judged(text=text, rules=(allow_all,)))


def test_what_no_grant_covers_may_be_paid_for():
    assert all(each.ok for each in judged(text=TEXT.replace("count = 4\n[[pool]]", "count = 3\n[[pool]]"), paid=True))


def test_an_unusual_runtime_is_taken_if_the_zone_has_it():
    assert all(each.ok for each in judged(text=TEXT.replace("[[pool]]", '[[pool]]\nruntime = "tpu-vm-tf-2.18.0"')))


def test_a_head_that_is_too_small_for_the_model_names_the_cheapest_that_is_not():
    assert all(each.ok for each in judged(head_bytes=10.0 * GIB))
    found = wrong(head_bytes=40.0 * GIB)
    assert found.id == "head" and "needs 40 GiB" in found.sentence and found.mend.startswith('type = "')


def test_buckets_far_away_are_allowed_where_the_file_says_so():
    assert all(each.ok for each in judged(text=f"allow_cross_region = true\n{TEXT}", bucket="us-east1"))


def test_commands_that_mend_can_be_typed_as_they_are():
    for facts in ({"rules": ()}, {"apis": frozenset()}, {"bucket": None}):
        assert shlex.split(wrong(**facts).mend)[0] == "gcloud"


def test_every_net_of_the_file_is_asked_about():
    from pathlib import Path

    assert nets_of(parse_toml(TEXT, Path("f"), SwarmFile)) == set(FACTS.subnetworks)


def test_what_the_head_needs_is_what_plan_says_of_the_model():
    text = TEXT.replace("[head]", '[train]\nrecipe = "gpt2-124m"\nsteps = 10\nmembers = 4\n\n[head]')
    exchanged = Exchanged(124_439_808, 1.0, 50)
    needed = head(4, exchanged, traffic(exchanged), "nesterov").memory_bytes
    assert bring.head_bytes(read(text)) == pytest.approx(needed, rel=1e-3)
    assert bring.head_bytes(read(TEXT)) is None
