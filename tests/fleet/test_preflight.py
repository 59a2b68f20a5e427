"""The checks before the first machine is created: each fails with a reason and a remedy."""

import dataclasses
import datetime
from pathlib import Path

import pytest

from tests.fleet.conftest import GOLDEN
from tpuswarm.cli.fleet import apply
from tpuswarm.cloud.errors import Denied, NoQuota, NotSignedIn, Unreachable
from tpuswarm.cloud.google.accounts import PERMISSIONS_BY_ROLE, Grantee, Lack
from tpuswarm.cloud.google.firewall import Rule, fleet_rules
from tpuswarm.cloud.google.project import APIS, BucketSettings, RegionQuota, Subnetwork
from tpuswarm.cloud.google.quotas import Quota
from tpuswarm.cloud.protocol import Machine, Worker
from tpuswarm.config.toml_file import parse_toml
from tpuswarm.config.units import GIB
from tpuswarm.fleet.apply.preflight import Check, run_checks
from tpuswarm.fleet.apply.project_facts import NetworkKey, ProjectFacts, network_keys
from tpuswarm.fleet.spec.file import SwarmFile
from tpuswarm.plan.head import size_head
from tpuswarm.plan.traffic import Exchange, member_traffic

NOW = datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC).timestamp()
ZONE, NETWORK = "us-central1-b", "tpuswarm-mine"
TEXT = (GOLDEN / "preflight.toml").read_text()
SPOT_QUOTA = "TPUV2sPreemptiblePerProjectPerZoneForTPUAPI"
ACCOUNT = "1-compute@developer.gserviceaccount.com"
BUCKET_ROLE, _, TPU_ROLE, *_ = Grantee(ACCOUNT, "my-project", "mine-bucket").bindings(PERMISSIONS_BY_ROLE, "ann")
NET = NetworkKey(NETWORK, NETWORK, "us-central1")
FACTS = ProjectFacts(
    project="my-project",
    apis=frozenset(APIS),
    billing="000000-AAAAAA",
    quotas=(Quota(SPOT_QUOTA, {ZONE: 48}),),
    types={ZONE: ("v2-8", "v3-8")},
    runtimes={ZONE: ("tpu-ubuntu2204-base", "tpu-vm-tf-2.18.0")},
    machine_types={ZONE: ("n2-highmem-2", "n2-highmem-8", "n2-highmem-32")},
    bucket=BucketSettings("us-central1"),
    subnetworks={NET: Subnetwork("10.128.0.0/20", False)},
    region_quotas={"us-central1": {"IN_USE_ADDRESSES": RegionQuota(8, 1), "INSTANCES": RegionQuota(24, 1)}},
    nats={NET: False},
    rules=fleet_rules(NETWORK, "tpuswarm-mine", "tpuswarm mine"),
    account=ACCOUNT,
)
TWO_ZONES = {ZONE: (), "europe-west4-a": ()}
REQUIRED_APIS = frozenset(APIS) - {"cloudquotas.googleapis.com", "cloudbilling.googleapis.com"}
OPEN_RULE = Rule("allow-all", NETWORK, (("all", ()),), ("0.0.0.0/0",))


def read(text: str) -> SwarmFile:
    return parse_toml(text, Path("swarm.toml"), SwarmFile)


def run(text: str = TEXT, paid: bool = False, head_bytes: float | None = None, **facts) -> list[Check]:
    return run_checks(read(text), dataclasses.replace(FACTS, **facts), NOW, paid, head_bytes)


def failed(*args, **facts) -> Check:
    (only,) = [check for check in run(*args, **facts) if not check.ok]
    return only


def test_zone_that_does_not_answer_is_left_out_if_another_does():
    text = TEXT.replace(f'zones = ["{ZONE}"]', f'zones = ["us-central1-c", "{ZONE}"]')
    assert text != TEXT
    refused = {"us-central1-c": Denied("denied")}
    found = run(text, types={**FACTS.types, **refused}, runtimes={**FACTS.runtimes, **refused})
    assert all(check.ok for check in found)
    assert [check.sentence for check in found if not check.known and check.id == "zone"] == [
        "us-central1-c is left out now: denied"
    ]


def test_missing_tensorflow_image_of_pods_is_replaced_by_another_of_its_kind():
    text = TEXT.replace("[[pool]]", '[[pool]]\nruntime = "tpu-vm-tf-2.14.0-pod"')
    offered = ("tpu-ubuntu2204-base", "tpu-vm-tf-2.14.1", "tpu-vm-tf-2.14.1-pod", "tpu-vm-tf-2.18.0-pod-pjrt")
    assert failed(text, runtimes={ZONE: offered}).mend == 'runtime = "tpu-vm-tf-2.14.1-pod"'


@pytest.mark.parametrize(
    ("how", "limit", "found"),
    [
        ("spot", 16, "wants 4 spot v6e-8, each takes 8 of the quota; the project may have us-central1-b: 16"),
        ("spot", 32, "wants 4 v6e-8: us-central1-b has quota for 4 of them"),
        ("on-demand", 16, "wants 4 v6e-8: Google does not tell the quota"),
    ],
)
def test_pool_of_compute_engine_takes_the_quotas_there(how, limit, found):
    text = TEXT.replace('type = "v2-8"\nzones', f'type = "v6e-8"\napi = "compute"\nhow = "{how}"\nzones')
    image = read(text).pool[0].image
    quotas = (Quota("PREEMPTIBLE-TPU-V6E-per-project-region", {"us-central1": limit}), *FACTS.quotas)
    checks = run(text, paid=True, quotas=quotas, machine_types={ZONE: ("ct6e-standard-8t",)}, images={image: True})
    (quota,) = [check for check in checks if check.id == "quota"]
    assert found in quota.sentence and quota.ok == (" 4 of " in found or "not tell" in found)


def test_zones_of_a_region_share_its_quota():
    text = TEXT.replace(f'zones = ["{ZONE}"]', f'zones = ["us-central1-c", "{ZONE}"]')
    region = Quota("TPUV2sPreemptiblePerProjectPerRegionForTPUAPI", {"us-central1": 16})
    zones = {zone: FACTS.types[ZONE] for zone in ("us-central1-c", ZONE)}
    found = failed(text, quotas=(region,), types=zones, runtimes={zone: FACTS.runtimes[ZONE] for zone in zones})
    assert found.id == "quota" and "set count = 2" in found.mend


def test_all_checks_pass_where_all_is_right():
    found = run()
    assert all(check.ok and check.sentence and not check.mend for check in found)
    assert {check.id for check in found} >= {
        "credentials", "project", "billing", "apis", "type", "runtime", "bucket", "addresses", "firewall", "account",
        "price", "quota",
    }  # fmt: skip
    assert network_keys(read(TEXT)) == set(FACTS.subnetworks)


@pytest.mark.parametrize(
    ("facts", "check", "sentence", "remedy"),
    [
        ({"apis": NotSignedIn("x: expired; y")}, "credentials", "expired", "gcloud auth application-default login"),
        ({"apis": Unreachable("Google Cloud cannot be reached")}, "credentials", "cannot be reached", "network"),
        ({"apis": Denied("denied"), "types": {ZONE: Denied("denied")}, "machine_types": {ZONE: Denied("denied")}},
         "project", "denied", "gcloud projects describe my-project"),
        ({"os_login": True}, "policy", "OS Login on for all machines", "disable-enforce compute.requireOsLogin"),
        ({"billing": None}, "billing", "no billing account", "gcloud billing projects link my-project"),
        ({"apis": frozenset(APIS) - {"tpu.googleapis.com"}},
         "apis", "Cloud TPU", "gcloud services enable tpu.googleapis.com --project=my-project"),
        ({"quotas": (Quota(SPOT_QUOTA, {ZONE: 0}),)}, "quota", f"{ZONE}: 0 ({SPOT_QUOTA})", "project=my-project"),
        ({"quotas": (Quota(SPOT_QUOTA, {ZONE: 16}),)}, "quota", "each takes 8", "set count = 2"),
        ({"types": {ZONE: ("v3-8",)}}, "type", f"{ZONE} offers no v2-8", "europe-west4-a"),
        ({"types": {ZONE: NoQuota("no such zone; take another")}}, "type", "no such zone", "take another"),
        ({"runtimes": {ZONE: ("tpu-vm-cos",)}}, "runtime", "has no runtime tpu-ubuntu2204-base", 'runtime = "'),
        ({"machine_types": {ZONE: ("n2-highmem-8",)}},
         "type", "n2-highmem-2, the type of head", 'type = "n2-highmem-8"'),
        ({"bucket": None}, "bucket", "there is no bucket mine-bucket", "--location=us-central1"),
        (
            {"bucket": BucketSettings("us-central1", has_retention=True)}, "bucket", "has a retention policy",
            "--clear-retention-period",
        ),
        (
            {"bucket": BucketSettings("us-central1", requester_pays=True)}, "bucket", "requesters to pay",
            "--no-requester-pays",
        ),
        ({"bucket": BucketSettings("us-east1")}, "bucket", "costs $0.02", "allow_cross_region = true"),
        ({"subnetworks": {NET: None}}, "addresses", "no addresses", "gcloud compute networks subnets create"),
        ({"subnetworks": {NET: Subnetwork("10.0.0.0/29", False)}},
         "addresses", "4 addresses (10.0.0.0/29) for 5 hosts", "expand-ip-range"),
        ({"region_quotas": {"us-central1": {"IN_USE_ADDRESSES": RegionQuota(8, 4)}}},
         "region", "us-central1: 4 of 8 external addresses are free or", "in [[pool]], with Cloud NAT"),
        ({"region_quotas": {"us-central1": {"IN_USE_ADDRESSES": RegionQuota(8, 4)}}, "nats": {NET: True}},
         "region", "(quota IN_USE_ADDRESSES)", "external_ips = false in [[pool]]; or 4 hosts at most"),
        ({"region_quotas": {"us-central1": {"INSTANCES": RegionQuota(8, 4)}}},
         "region", "and 5 hosts need one each (quota INSTANCES)", "4 hosts at most, another region"),
        ({"rules": ()}, "firewall", "tag tpuswarm-mine", "gcloud compute firewall-rules create tpuswarm-mine-inside"),
        ({"rules": (*FACTS.rules, OPEN_RULE)},
         "firewall", "allow-all lets 0.0.0.0/0 in to every port", "gcloud compute firewall-rules delete allow-all"),
        ({"account": None}, "account", "no default service account", "gcloud iam service-accounts create"),
        ({"may_use": {ACCOUNT: False}, "user": "ann@example.com"},
         "account", "you may not create machines with", "--member=user:ann@example.com --role=roles/iam"),
        ({"lacks": {ACCOUNT: (Lack(BUCKET_ROLE, ("storage.objects.create",)), Lack(TPU_ROLE, ("tpu.nodes.create",)))}},
         "account", f"{ACCOUNT}, which lacks storage.objects.create, tpu.nodes.create",
         "--role=roles/storage.objectAdmin && gcloud projects add-iam-policy-binding my-project"),
        ({"head_bytes": 40.0 * GIB}, "head", "needs 40 GiB", 'type = "'),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)  # fmt: skip
def test_wrong_fact_fails_its_check_with_a_remedy(facts, check, sentence, remedy):
    found = failed(**facts)
    assert (found.id, sentence in found.sentence, remedy in found.mend) == (check, True, True), found


@pytest.mark.parametrize(
    ("old", "new", "check", "words"),
    [
        ('how = "spot"\ncount = 4', 'how = "spot"\ncount = 3', "grants", "no grant covers 1 v2-8 of pool small"),
        ("[[grant]]", "[budget]\nper_hour = 0.01\n[[grant]]", "price", "its budget is $0.01"),
        (f'network = "{NETWORK}"\n[head]', "[head]", "firewall", "network default"),
    ],
)
def test_wrong_line_of_the_file_fails_its_check(old, new, check, words):
    found = failed(TEXT.replace(old, new))
    assert (found.id, words in found.sentence) == (check, True) and found.mend, found


SINGLE_MACHINE = TEXT[: TEXT.index("[head]")].replace("count = 4\nnetwork", "count = 1\nnetwork")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (SINGLE_MACHINE, {"rules": (OPEN_RULE,)}),
        (TEXT.replace("count = 4\n[[pool]]", "count = 3\n[[pool]]"), {"paid": True}),
        (TEXT.replace("[[pool]]", '[[pool]]\nruntime = "tpu-vm-tf-2.18.0"'), {}),
        (f"allow_cross_region = true\n{TEXT}", {"bucket": BucketSettings("us-east1")}),
        (TEXT, {"head_bytes": 10.0 * GIB}),
        (TEXT, {"apis": REQUIRED_APIS, "quotas": Denied("the API is not on"), "billing": Denied("the API is not on")}),
    ],
    ids=["single machine", "paid", "unusual runtime", "cross-region", "large model", "optional APIs"],
)
def test_permitted_deviation_passes(text, facts):
    assert all(check.ok for check in run(text, **facts))


def test_machines_without_external_addresses_need_private_google_access_and_no_quota_of_addresses():
    text = TEXT.replace("count = 4\nnetwork", "count = 4\nexternal_ips = false\nnetwork")
    quotas = {"us-central1": {"IN_USE_ADDRESSES": RegionQuota(1, 0)}}
    found = failed(text, region_quotas=quotas)
    assert "reach neither buckets nor the TPU service" in found.sentence
    assert found.mend.endswith(
        f"update {NETWORK} --region=us-central1 --project=my-project --enable-private-ip-google-access"
    )
    subnetworks = {NET: Subnetwork("10.128.0.0/20", True)}
    assert all(check.ok for check in run(text, region_quotas=quotas, subnetworks=subnetworks))


@pytest.mark.parametrize(("zones", "fits"), [(f'["{ZONE}", "europe-west4-a"]', True), (f'["{ZONE}"]', False)])
def test_pool_may_share_the_addresses_of_its_regions(zones, fits):
    """Four hosts of the pool go to either region, the head to the first."""
    free = {"us-central1": RegionQuota(8, 5), "europe-west4": RegionQuota(8, 6)}
    quotas = {region: {"IN_USE_ADDRESSES": quota} for region, quota in free.items()}
    facts = dataclasses.replace(FACTS, region_quotas=quotas, types=TWO_ZONES, runtimes={zone: () for zone in TWO_ZONES})
    text = TEXT.replace(f'zones = ["{ZONE}"]', f"zones = {zones}")
    region = [check for check in run_checks(read(text), facts, NOW, True) if check.id == "region"]
    assert all(check.ok for check in region) == fits, region


def test_addresses_of_the_fleet_itself_count_as_free():
    quotas = {"us-central1": {"IN_USE_ADDRESSES": RegionQuota(5, 5)}}
    assert failed(region_quotas=quotas).id == "region"
    machine = Machine("v", ZONE, "tpu", "v2-8", "ready", "READY", workers=(Worker("10.0.0.2", "192.0.2.1"),) * 5)
    assert all(check.ok for check in run(region_quotas=quotas, own=(machine,)))


@pytest.mark.parametrize("fact", ["apis", "billing", "quotas", "account", "lacks"])
def test_fact_that_a_member_may_not_read_does_not_stop_creation(fact):
    denied = Denied("asking: the caller does not have permission; an owner gives it")
    found = run(**{fact: {ACCOUNT: denied} if fact == "lacks" else denied})
    (unknown,) = [check for check in found if not check.known]
    assert all(check.ok for check in found) and unknown.sentence.startswith("could not be checked: asking: the caller")
    assert {check.id for check in found} >= {"type", "runtime", "bucket", "firewall", "price"}


def test_head_needs_the_memory_that_the_plan_says():
    text = TEXT.replace("[head]", '[train]\nrecipe = "gpt2-124m"\nsteps = 10\nmembers = 4\n\n[head]')
    exchanged = Exchange(124_439_808, 1.0, 50)
    needed = size_head(4, exchanged, member_traffic(exchanged), "nesterov").memory_bytes
    assert apply.head_memory_bytes(read(text)) == pytest.approx(needed, rel=1e-3)
    assert apply.head_memory_bytes(read(TEXT)) is None
