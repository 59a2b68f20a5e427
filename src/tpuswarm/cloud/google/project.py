"""What a project needs before it has machines: looked at, and made. Whatever is there already is left as it is."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tpuswarm.cloud.errors import Denied, NotFound, Taken, Unreachable
from tpuswarm.cloud.google import firewall, quotas
from tpuswarm.cloud.google.access import SECONDS, Access
from tpuswarm.cloud.google.answers import of_compute, of_json
from tpuswarm.cloud.google.buckets import HOST, bucket_url
from tpuswarm.cloud.google.failures import judge

BILLING_API = "cloudbilling.googleapis.com"
APIS = {
    BILLING_API: "Cloud Billing",
    "cloudquotas.googleapis.com": "Cloud Quotas",
    "compute.googleapis.com": "Compute Engine",
    "storage.googleapis.com": "Cloud Storage",
    "tpu.googleapis.com": "Cloud TPU",
}
"""Those that tpuswarm calls, in the order of turning them on: whether somebody pays can be asked of the first alone."""
LONGEST_S = 600.0
"""Within which an API is on, or a network made."""
LOOK_S = 1.0


class BucketSettings(NamedTuple):
    """The settings of a bucket that matter to runs in it."""

    region: str
    """Such as us-central1."""
    soft_delete_s: float = 0.0
    """How long a deleted object is kept, and billed."""
    has_retention: bool = False
    requester_pays: bool = False


class Subnetwork(NamedTuple):
    """A network's part in a region."""

    addresses: str
    """Such as 10.128.0.0/20."""
    reaches_google: bool
    """Whether machines without an external address reach Google's own services (Private Google Access)."""


class Project:
    """The set-up of one project. Everything may raise any CloudError."""

    def __init__(self, access: Access):
        self._access = access

    @property
    def id(self) -> str:
        """The project's."""
        return self._access.project

    def apis(self) -> frozenset[str]:
        """APIs that are on."""
        url = self._access.url("serviceusage.googleapis.com", f"v1/projects/{self.id}/services")
        query = {"filter": "state:ENABLED", "pageSize": "200"}
        found = self._pages("asking which APIs are on", url, "services", query)
        return frozenset(each["name"].rsplit("/", 1)[-1] for each in found)

    def turn_on(self, api: str) -> None:
        """Turn an API on and wait until it is."""
        doing = f"turning on {api}"
        host = "serviceusage.googleapis.com"
        operation = self._access.post(doing, self._access.url(host, f"v1/projects/{self.id}/services/{api}:enable"))

        def look() -> bool:
            nonlocal operation
            if not operation.get("done"):
                operation = self._access.get(doing, self._access.url(host, f"v1/{operation['name']}"))
            if "error" in operation:
                raise judge(of_json(operation, 400), doing, self.id)
            return bool(operation.get("done"))

        _wait(doing, look)

    def billing(self) -> str | None:
        """The billing account that pays for the project; None: nobody does."""
        url = self._access.url(BILLING_API, f"v1/projects/{self.id}/billingInfo")
        found = self._access.get("asking who pays for the project", url)
        return found["billingAccountName"].rsplit("/", 1)[-1] if found.get("billingEnabled") else None

    def quotas(self) -> tuple[quotas.Quota, ...]:
        """How many TPUs the project may have."""
        place = f"projects/{self.id}/locations/global/services/tpu.googleapis.com"
        url = self._access.url("cloudquotas.googleapis.com", f"v1/{place}/quotaInfos")
        return quotas.of_infos(self._pages("asking for quotas", url, "quotaInfos", {"pageSize": "500"}))

    def find_bucket(self, name: str, owner: str | None = None) -> BucketSettings | None:
        """Return the settings of a bucket, None if there is none. Raises Taken for one of somebody else's.

        That one may read and write it proves nothing: names of buckets are global, and whoever made it first may have
        let everybody in. `owner`: the project that it is of, where that is another one.
        """
        try:
            found = self._access.get(f"looking for bucket {name}", bucket_url(self._access, name))
        except NotFound:
            return None
        except Denied as error:
            raise Taken(f"bucket {name} is somebody else's, as it seems: choose another name ({error})") from None
        of = owner or self.id
        mine = self._pages(f"listing buckets of {of}", self._buckets, "items", {"project": of, "prefix": name})
        if all(each["name"] != name for each in mine):
            raise Taken(
                f"bucket {name} is not of project {of}, and whoever owns it could tell the fleet what to do: choose "
                'another name, or name its project in [storage] with project = "…"'
            )
        return BucketSettings(
            str(found["location"]).lower(),
            float(found.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0)),
            "retentionPolicy" in found,
            found.get("billing", {}).get("requesterPays", False),
        )

    def make_bucket(self, name: str, region: str, labels: Mapping[str, str]) -> None:
        """Make a bucket for the project alone. Raises Taken where anybody on Google Cloud has one of that name."""
        access = {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "enforced"}
        bucket = {"name": name, "location": region, "labels": dict(labels), "iamConfiguration": access}
        # Else all that is deleted or overwritten, as a fleet's document is every few seconds, costs for a week more.
        bucket["softDeletePolicy"] = {"retentionDurationSeconds": "0"}
        self._access.post(f"making bucket {name} in {region}", self._buckets, bucket, project=self.id)

    def label_bucket(self, name: str, labels: Mapping[str, str]) -> None:
        """Add labels to a bucket; those that it has stay as they are."""
        doing = f"labelling bucket {name}"
        access, url = self._access, bucket_url(self._access, name)
        there = access.get(doing, url).get("labels", {})
        if new := {key: value for key, value in labels.items() if key not in there}:
            access.change(doing, lambda: access.rest("PATCH", url, {}, json={"labels": {**there, **new}}))

    def has_network(self, name: str) -> bool:
        """Whether there is such a network."""
        try:
            self._access.get(f"looking for network {name}", self._compute(f"global/networks/{name}"))
        except NotFound:
            return False
        return True

    def make_network(self, name: str, description: str) -> None:
        """Make a network with a subnetwork in every region and no rules: nobody is let in."""
        from google.cloud import compute_v1

        network = compute_v1.Network(name=name, auto_create_subnetworks=True, description=description)
        self._make(f"making network {name}", "Networks", network_resource=network)

    def subnetwork(self, network: str, region: str, subnetwork: str | None = None) -> Subnetwork | None:
        """A network's part in a region; None: it has none there."""
        doing = f"asking for the addresses of network {network} in {region}"
        found = self._pages(doing, self._compute(f"regions/{region}/subnetworks"), "items", {})
        fits = (
            Subnetwork(each["ipCidrRange"], bool(each.get("privateIpGoogleAccess")))
            for each in found
            if each["network"].rsplit("/", 1)[-1] == network and subnetwork in (None, each["name"])
        )
        return next(fits, None)

    def rules(self) -> tuple[firewall.Rule, ...]:
        """Firewall rules that let something in, of all networks."""
        found = self._pages("asking for firewall rules", self._compute("global/firewalls"), "items", {})
        return tuple(rule for each in found if (rule := firewall.of_firewall(each)))

    def make_rule(self, rule: firewall.Rule) -> None:
        """Make a firewall rule."""
        from google.cloud import compute_v1

        allowed = [compute_v1.Allowed(I_p_protocol=protocol, ports=ports) for protocol, ports in rule.allowed]
        resource = compute_v1.Firewall(
            name=rule.name,
            network=f"projects/{self.id}/global/networks/{rule.network}",
            description=rule.description,
            direction="INGRESS",
            allowed=allowed,
            source_ranges=rule.ranges,
            source_tags=rule.source_tags,
            target_tags=rule.target_tags,
        )
        self._make(f"making firewall rule {rule.name}", "Firewalls", firewall_resource=resource)

    def default_account(self) -> str | None:
        """The service account that machines have where none is named; None: the project has none."""
        found = self._access.get("asking for the project", self._access.url(_COMPUTE, f"compute/v1/projects/{self.id}"))
        return found.get("defaultServiceAccount")

    def forces_os_login(self) -> bool:
        """Whether a policy of an organisation turns OS Login on for all machines of the project."""
        doing = "asking for the organisation's policy on OS Login"
        url = self._access.url("cloudresourcemanager.googleapis.com", f"v1/projects/{self.id}:getEffectiveOrgPolicy")
        about = {"constraint": "constraints/compute.requireOsLogin"}
        found = self._access.ask(doing, lambda: self._access.rest("POST", url, {}, json=about).json())
        return bool(found.get("booleanPolicy", {}).get("enforced"))

    @property
    def _buckets(self) -> str:
        return self._access.url(HOST, "storage/v1/b")

    def _compute(self, path: str) -> str:
        return self._access.url(_COMPUTE, f"compute/v1/projects/{self.id}/{path}")

    def _make(self, doing: str, client: str, **resource: Any) -> None:
        insert = functools.partial(self._access.compute(client).insert_unary, project=self.id, **resource)
        made = self._access.change(doing, lambda: insert(timeout=SECONDS))
        operations = self._access.compute("GlobalOperations")
        get = functools.partial(operations.get, project=self.id, operation=made.name, timeout=SECONDS)

        def look() -> bool:
            found = self._access.ask(doing, get)
            if answer := of_compute(found):
                raise judge(answer, doing, self.id)
            return bool(found.status.name == "DONE")

        _wait(doing, look)

    def _pages(self, doing: str, url: str, key: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        token: dict[str, str] = {}
        while True:
            page = self._access.get(doing, url, **query, **token)
            found += page.get(key, ())
            if not page.get("nextPageToken"):
                return found
            token = {"pageToken": page["nextPageToken"]}


_COMPUTE = "compute.googleapis.com"


def _wait(doing: str, over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not over():
        if time.monotonic() > deadline:
            raise Unreachable(f"{doing}: not done after {LONGEST_S / 60:.0f} minutes; the same command goes on")
        time.sleep(LOOK_S)
