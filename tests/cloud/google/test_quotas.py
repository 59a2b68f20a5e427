"""TPU limits from the Cloud Quotas API. Names of quotas are from public answers."""

import pytest

from tpuswarm.catalog import accelerators
from tpuswarm.cloud.google.quotas import allowance, quota_units, quotas_from_infos


def info(quota: str, **limits: str) -> dict:
    """Return a quotaInfo: limits by place, `others` for all other places."""
    by = "zone" if "PerZone" in quota else "region"
    named = [
        {"dimensions": {by: place.replace("_", "-")}, "details": {"value": value}}
        for place, value in limits.items()
        if place != "others"
    ]
    rest = {"details": {"value": limits.get("others", "0")}, "applicableLocations": ["asia-east1-c", "asia-east1"]}
    return {"quotaId": quota, "dimensions": [by], "dimensionsInfos": [*named, rest]}


QUOTAS = quotas_from_infos(
    [
        info("TPUV2sPerProjectPerZoneForTPUAPI", us_central1_b="16", us_central1_c="0", others="8"),
        info("TPUV2sPodPerProjectPerZoneForTPUAPI", us_central1_a="512"),
        info("TPUV2sPreemptiblePerProjectPerZoneForTPUAPI", us_central1_b="48"),
        info("TPUV5sLitepodPerProjectPerZoneForTPUAPI", us_central1_a="16"),
        info("TPUV5sLitepodServingPerProjectPerZoneForTPUAPI", us_central1_a="4"),
        info("TPUV5sPreemptibleLitepodPerProjectPerRegionForTPUAPI", us_west4="10000"),
        info("TPUV6EPreemptiblePerProjectPerZoneForTPUAPI", us_east5_b="64"),
        info("TPUV6EPreemptiblePerProjectPerRegionForTPUAPI", us_east5="0"),
        info("TPUV5PPreemptiblePerProjectPerZoneForTPUAPI", us_east5_a="-1"),
        {"quotaId": "CreateNodePerMinutePerProject", "dimensionsInfos": []},
    ]
)


@pytest.mark.parametrize(
    ("type_", "spot", "zone", "limit", "named"),
    [
        ("v2-8", False, "us-central1-b", 16, "TPUV2sPerProjectPerZoneForTPUAPI"),
        ("v2-8", False, "us-central1-c", 0, "TPUV2sPerProjectPerZoneForTPUAPI"),
        ("v2-8", False, "asia-east1-c", 8, "TPUV2sPerProjectPerZoneForTPUAPI"),
        ("v2-8", True, "us-central1-b", 48, "TPUV2sPreemptiblePerProjectPerZoneForTPUAPI"),
        ("v2-32", False, "us-central1-a", 512, "TPUV2sPodPerProjectPerZoneForTPUAPI"),
        # A public log of 2026: v5litepod-8 is refused for the quota for serving, 4, in spite of 16 for training.
        ("v5e-8", False, "us-central1-a", 4, "TPUV5sLitepodServingPerProjectPerZoneForTPUAPI"),
        ("v5e-16", False, "us-central1-a", 16, "TPUV5sLitepodPerProjectPerZoneForTPUAPI"),
        ("v5e-16", True, "us-west4-a", 10000, "TPUV5sPreemptibleLitepodPerProjectPerRegionForTPUAPI"),
        # https://github.com/marin-community/marin/pull/1612: quota in the zone and none in its region.
        ("v6e-8", True, "us-east5-b", 0, "TPUV6EPreemptiblePerProjectPerRegionForTPUAPI"),
        ("v5p-8", True, "us-east5-a", 10**9, "TPUV5PPreemptiblePerProjectPerZoneForTPUAPI"),
    ],
)
def test_each_type_counts_against_its_quota(type_, spot, zone, limit, named):
    assert allowance(QUOTAS, type_, spot, zone) == (limit, named)


@pytest.mark.parametrize(
    ("type_", "spot", "zone"),
    [("v2-8", False, "europe-west4-a"), ("v3-8", False, "us-central1-a"), ("v2-32", True, "us-central1-a")],
)
def test_allowance_without_a_quota_is_unknown(type_, spot, zone):
    assert allowance(QUOTAS, type_, spot, zone) is None


def test_size_is_the_number_in_the_api_name():
    for accelerator in accelerators():
        if accelerator.api_name:
            assert quota_units(accelerator.name) == int(accelerator.api_name.rsplit("-", 1)[1])
