"""`catalog --check`, against a local cloud that offers what the catalogue says, but for planted differences."""

from tests.local_cloud import local_cloud
from tpuswarm import catalog
from tpuswarm.cli.plan import catalog_check
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.rehearsal.connect import connect, send_command


def test_check_names_zones_that_differ_and_no_others(tmp_path, monkeypatch):
    with local_cloud(tmp_path) as place:
        access = Access("my-project", connect(place.path))
        assert catalog_check.compare_with_project(access) == []
        send_command(place, "break", name="us-central2-b", fault="hidden")
        zones, of_v3 = catalog.Accelerator.zones, catalog.find("v3-8")

        def wrong_zones(tpu, access="open"):
            if tpu is of_v3:
                return ()
            return (*zones(tpu, access), *("us-west1-c",) * (tpu.name == "v2-8"))

        monkeypatch.setattr(catalog.Accelerator, "zones", wrong_zones)
        found = catalog_check.compare_with_project(access)
    assert found[:1] == ["europe-west4-a, TPU API: offers v3-8, which the catalogue lacks there"]
    assert "us-central2-b, TPU API: this project does not see the zone, which the catalogue calls open" in found
    assert "us-west1-c, TPU API: offers no v2-8, which the catalogue calls open there" in found
    assert all("v3-8" in line or "us-central2-b" in line or "us-west1-c" in line for line in found)
