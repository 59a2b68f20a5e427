"""The provider against the local cloud, through Google's own clients."""

import pytest

from tests.cloud.google.conftest import DARK, FINE, FORBIDDEN, FULL, HIDDEN, until
from tpuswarm.cloud.errors import Invalid, NoCapacity, NoQuota, NotFound, NotSignedIn, Taken
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.google.provider import Google
from tpuswarm.cloud.protocol import TpuSpec


def spec(name: str, zone: str = FINE, type_: str = "v2-8", how="on-demand", **fields) -> TpuSpec:
    return TpuSpec(name, zone, type_, how, "f1e2", "small", "tpu-ubuntu2204-base", **fields)


def only(google: Google, zone: str = FINE):
    """The one machine that there is; None if there is none."""
    found = google.machines([zone]).machines
    assert len(found) <= 1
    return found[0] if found else None


def ready(google: Google):
    return until(lambda: (found := only(google)) and found.state == "ready" and found)


def test_a_slice_is_one_machine_with_its_workers(google):
    operation = google.create(spec("n1", type_="v2-32", how="spot", labels={"mine": "1"}, external_ips=False))
    assert only(google).state == "creating" and not google.outcome(operation).error
    machine = ready(google)
    assert google.outcome(operation) == (True, None)
    assert (machine.name, machine.zone, machine.type, machine.how) == ("n1", FINE, "v2-32", "spot")
    assert (machine.fleet, machine.pool, machine.labels["mine"]) == ("f1e2", "small", "1")
    assert len(machine.workers) == 4 and all(each.internal and not each.external for each in machine.workers)
    assert machine.healthy and machine.request is None
    with pytest.raises(Taken):
        google.create(spec("n1"))
    with pytest.raises(Invalid, match="slice of 4 hosts"):
        google.stop(machine)
    google.delete(machine)
    left = only(google)
    assert left is None or left.state == "deleting"
    until(lambda: only(google) is None)
    with pytest.raises(NotFound):
        google.delete(machine)


def test_a_machine_on_demand_stops_and_starts_and_a_spot_one_does_not(google):
    google.create(spec("n1"))
    google.stop(ready(google))
    stopped = until(lambda: only(google).state == "stopped" and only(google))
    google.start(stopped)
    machine = ready(google)
    with pytest.raises(Invalid, match="could not be started again"):
        google.stop(type(machine)(**{**vars(machine), "how": "spot"}))


def test_a_queued_request_and_its_node_are_one_machine_and_go_together(google):
    google.create(spec("n1", how="queued"))
    waiting = only(google)
    assert (waiting.state, waiting.name, waiting.request, waiting.fleet) == ("waiting", "n1", "n1", "f1e2")
    machine = ready(google)
    assert (machine.name, machine.request, machine.how) == ("n1", "n1", "queued")
    google.delete(machine)
    until(lambda: only(google) is None)
    assert not list(google.access.tpu.list_queued_resources(parent=f"projects/my-project/locations/{FINE}"))


def test_a_request_that_the_cloud_gave_up_is_dead_and_says_why(google):
    google.create(spec("n1", zone=FULL, how="queued", wait_s=60.0))
    dead = until(lambda: (found := only(google, FULL)) and found.state == "dead" and found)
    assert "validity" in dead.why and dead.error is not None
    google.delete(dead)
    until(lambda: only(google, FULL) is None)


def test_without_capacity_the_outcome_says_so(google):
    operation = google.create(spec("n1", zone=FULL))
    error = until(lambda: google.outcome(operation).error)
    assert isinstance(error, NoCapacity) and str(error).startswith("create of n1: There is no more capacity")


def test_without_quota_creation_names_the_quota(google):
    with pytest.raises(
        NoQuota, match=r"creating n1 in us-central1-c: Quota limit 'TPUV2sPerProject.*ask for more"
    ) as no:
        google.create(spec("n1", zone=FORBIDDEN))
    assert no.value.limit == "TPUV2sPerProjectPerZoneForTPUAPI"


def test_a_zone_that_may_not_be_seen_holds_nothing_and_one_that_does_not_answer_is_unknown(google):
    with pytest.raises(NoQuota, match="was granted"):
        google.create(spec("n1", zone=HIDDEN))
    listing = google.machines([FINE, HIDDEN])
    assert HIDDEN not in listing.unreachable and DARK in listing.unreachable


def test_metadata_is_added_to_what_is_there(google):
    google.create(spec("n1", metadata={"startup-script": "true"}))
    machine = ready(google)
    operation = google.set_metadata(machine, {"ssh-keys": "me:key"})
    until(lambda: google.outcome(operation).done)
    node = google.access.tpu.get_node(name=f"projects/my-project/locations/{FINE}/nodes/n1")
    expected = {
        "startup-script": "true",
        "ssh-keys": "me:key",
        "enable-guest-attributes": "TRUE",
        "enable-oslogin": "FALSE",
    }
    assert dict(node.metadata) == expected


def test_what_nobody_has_written_down_is_empty(google):
    google.create(spec("n1"))
    machine = ready(google)
    assert google.guest_attributes(machine, 0, "nothing/here") == {}


def test_a_host_writes_down_its_keys(google):
    google.create(spec("n1", type_="v2-32"))
    machine = ready(google)
    first, last = (until(lambda at=at: google.guest_attributes(machine, at, "hostkeys/")) for at in (0, 3))
    assert first["ssh-ed25519"] and last["ssh-ed25519"] and first != last


def test_what_a_zone_offers(google):
    assert "v2-8" in google.types(FINE)
    assert "tpu-ubuntu2204-base" in google.runtimes(FINE)


def test_an_operation_that_the_cloud_has_forgotten_is_done(google):
    assert google.outcome(f"projects/my-project/locations/{FINE}/operations/operation-0") == (True, None)


def test_another_token_is_refused_with_the_way_to_sign_in(endpoints):
    stranger = Google(Access("my-project", Endpoints(endpoints.rpc, endpoints.http, "wrong")))
    with pytest.raises(NotSignedIn, match="gcloud auth application-default login"):
        stranger.types(FINE)
