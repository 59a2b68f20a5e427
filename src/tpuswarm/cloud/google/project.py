"""Inspect and set up a project: APIs, billing, quota, bucket, network, firewall. Existing resources stay unchanged."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tpuswarm.catalog import Api
from tpuswarm.cloud.errors import Denied, Invalid, NotFound, Taken, Unreachable
from tpuswarm.cloud.google import firewall, quotas
from tpuswarm.cloud.google.access import Access, wait_until
from tpuswarm.cloud.google.accounts import Accounts, Grantee
from tpuswarm.cloud.google.answers import answer_from_json, answer_from_operation
from tpuswarm.cloud.google.buckets import STORAGE_HOST, bucket_url
from tpuswarm.cloud.google.failures import cloud_error_for
from tpuswarm.cloud.google.instances import list_aggregated

BILLING_API, TPU_API = "cloudbilling.googleapis.com", "tpu.googleapis.com"
APIS = {
    BILLING_API: "Cloud Billing",
    "cloudquotas.googleapis.com": "Cloud Quotas",
    "cloudresourcemanager.googleapis.com": "Resource Manager",
    "compute.googleapis.com": "Compute Engine",
    "iam.googleapis.com": "IAM",
    "iamcredentials.googleapis.com": "IAM Credentials",
    "storage.googleapis.com": "Cloud Storage",
    TPU_API: "Cloud TPU",
}
"""The APIs that tpuswarm calls, in the order of enabling: the first one tells whether billing is on."""
COMPUTE_HOST = "compute.googleapis.com"


class BucketSettings(NamedTuple):
    """The settings of a bucket that matter to runs in it."""

    region: str
    """Such as us-central1."""
    soft_delete_s: float = 0.0
    """How long a deleted object is kept, and billed."""
    has_retention: bool = False
    requester_pays: bool = False


class Subnetwork(NamedTuple):
    """The part of a network in one region."""

    addresses: str
    """Such as 10.128.0.0/20."""
    reaches_google: bool
    """Whether machines without external addresses reach Google's services (Private Google Access)."""


class RegionQuota(NamedTuple):
    """A project's quota in one region, for example of external addresses, and its usage."""

    limit: int
    usage: int


class Project:
    """The set-up of one project. Every method may raise any CloudError."""

    def __init__(self, access: Access):
        self._access = access

    @property
    def id(self) -> str:
        return self._access.project

    @property
    def user(self) -> str | None:
        return self._access.account

    @property
    def accounts(self) -> Accounts:
        return Accounts(self._access)

    def apis(self) -> frozenset[str]:
        """Return the enabled APIs."""
        url = self._access.url("serviceusage.googleapis.com", f"v1/projects/{self.id}/services")
        query = {"filter": "state:ENABLED", "pageSize": "200"}
        services = self._list_all("asking which APIs are on", url, "services", query)
        return frozenset(service["name"].rsplit("/", 1)[-1] for service in services)

    def turn_on(self, api: str) -> None:
        """Enable an API and wait until it is on."""
        doing = f"turning on {api}"
        host = "serviceusage.googleapis.com"
        operation = self._access.post(doing, self._access.url(host, f"v1/projects/{self.id}/services/{api}:enable"))

        def is_done() -> bool:
            nonlocal operation
            if not operation.get("done"):
                operation = self._access.get(doing, self._access.url(host, f"v1/{operation['name']}"))
            if "error" in operation:
                raise cloud_error_for(answer_from_json(operation, 400), doing, self.id)
            return bool(operation.get("done"))

        wait_until(doing, is_done)

    def billing(self) -> str | None:
        """Return the project's billing account; None if billing is off."""
        url = self._access.url(BILLING_API, f"v1/projects/{self.id}/billingInfo")
        info = self._access.get("asking who pays for the project", url)
        return info["billingAccountName"].rsplit("/", 1)[-1] if info.get("billingEnabled") else None

    def quotas(self, apis: Iterable[Api]) -> tuple[quotas.Quota, ...]:
        """Return the quotas of TPUs in these of Google's APIs."""
        place = f"v1/projects/{self.id}/locations/global/services"
        urls = [
            self._access.url("cloudquotas.googleapis.com", f"{place}/{quotas.SERVICES[api]}/quotaInfos") for api in apis
        ]
        query = {"pageSize": "500"}
        infos = [info for url in urls for info in self._list_all("asking for quotas", url, "quotaInfos", query)]
        return quotas.quotas_from_infos(infos)

    def find_bucket(self, name: str, owner: str | None = None) -> BucketSettings | None:
        """Return the settings of a bucket; None if there is none. `owner`: its project, by default this one.

        Raises Taken if another project has it. Access proves nothing: bucket names are global, and its maker may have
        opened it to everybody.
        """
        try:
            found = self._access.get(f"looking for bucket {name}", bucket_url(self._access, name))
        except NotFound:
            return None
        except Denied as error:
            raise Taken(f"bucket {name} seems to belong to somebody else; choose another name ({error})") from None
        owner = owner or self.id
        query = {"project": owner, "prefix": name}
        owned = self._list_all(f"listing buckets of {owner}", self._buckets, "items", query)
        if all(bucket["name"] != name for bucket in owned):
            raise Taken(
                f"bucket {name} is not in project {owner}, so its owner could control the fleet; choose another name, "
                'or name its project in [storage] with project = "…"'
            )
        return BucketSettings(
            str(found["location"]).lower(),
            float(found.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0)),
            "retentionPolicy" in found,
            found.get("billing", {}).get("requesterPays", False),
        )

    def make_bucket(self, name: str, region: str, labels: Mapping[str, str]) -> None:
        """Create a private bucket. Raises Taken if any project on Google Cloud has one of that name."""
        access = {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "enforced"}
        bucket = {"name": name, "location": region, "labels": dict(labels), "iamConfiguration": access}
        # Without soft delete: deleted and overwritten objects, such as a fleet's document, would be billed for a week.
        bucket["softDeletePolicy"] = {"retentionDurationSeconds": "0"}
        self._access.post(f"making bucket {name} in {region}", self._buckets, bucket, project=self.id)

    def label_bucket(self, name: str, labels: Mapping[str, str]) -> None:
        """Add labels to a bucket; existing labels stay."""
        doing = f"labelling bucket {name}"
        access, url = self._access, bucket_url(self._access, name)
        existing = access.get(doing, url).get("labels", {})
        if new := {key: value for key, value in labels.items() if key not in existing}:
            access.call_once(doing, lambda: access.rest("PATCH", url, {}, json={"labels": {**existing, **new}}))

    def has_network(self, name: str) -> bool:
        try:
            self._access.get(f"looking for network {name}", self._compute(f"global/networks/{name}"))
        except NotFound:
            return False
        return True

    def make_network(self, name: str, description: str) -> None:
        """Create a network with a subnetwork in every region and without firewall rules."""
        network = {"name": name, "autoCreateSubnetworks": True, "description": description}
        self._make(f"making network {name}", "global/networks", network)

    def remove_network(self, name: str, description: str) -> list[str]:
        """Delete the firewall rules and the network that have this description; return their names.

        Raises Invalid if machines are in it: they would lose the rules, and keep the network.
        """
        self._check_unused(f"network {name}", lambda machine: _is_in(machine, name))
        rules = [rule.name for rule in self.rules() if (rule.network, rule.description) == (name, description)]
        for rule in rules:
            self._remove(f"deleting firewall rule {rule}", f"global/firewalls/{rule}")
        try:
            network = self._access.get(f"looking for network {name}", self._compute(f"global/networks/{name}"))
        except NotFound:
            return rules
        if network.get("description") != description:
            return rules
        self._remove(f"deleting network {name}", f"global/networks/{name}")
        return [*rules, name]

    def remove_account(self, grantee: Grantee) -> list[str]:
        """Delete a service account that tpuswarm has made, with its roles; return its name.

        Raises Invalid if machines use it.
        """
        account = grantee.account
        if not self.accounts.is_own(account):
            return []
        self._check_unused(f"service account {account}", lambda machine: _has_account(machine, account))
        self.accounts.remove(grantee)
        return [account]

    def _check_unused(self, what: str, uses: Callable[[Mapping[str, Any]], bool]) -> None:
        """Raise Invalid if machines use a resource, and Unreachable if some may. `uses`: asked about each machine."""
        doing = f"listing the machines with {what}"
        url = self._access.url(TPU_API, f"v2/projects/{self.id}/locations/-/nodes")
        pages = self._access.get_pages(doing, url)
        instances, unreachable = list_aggregated(self._access, "instances")
        silent = {*unreachable, *(zone.rsplit("/", 1)[-1] for page in pages for zone in page.get("unreachable", ()))}
        machines = [*instances, *(node for page in pages for node in page.get("nodes", ()))]
        if names := {machine["name"].rsplit("/", 1)[-1] for machine in machines if uses(machine)}:
            raise Invalid(
                f"{what} stays, because {len(names)} machine{'s use' if len(names) > 1 else ' uses'} it: "
                f"{', '.join(sorted(names))}; delete {'them' if len(names) > 1 else 'it'}, then run the command again"
            )
        if silent:
            raise Unreachable(
                f"{what} stays, because {', '.join(sorted(silent))} did not answer and may have machines with it; "
                "run the command again later"
            )

    def subnetwork(self, network: str, region: str, subnetwork: str | None = None) -> Subnetwork | None:
        """Return the part of a network in a region, or None."""
        doing = f"asking for the addresses of network {network} in {region}"
        resources = self._list_all(doing, self._compute(f"regions/{region}/subnetworks"), "items", {})
        matching = (
            Subnetwork(resource["ipCidrRange"], bool(resource.get("privateIpGoogleAccess")))
            for resource in resources
            if resource["network"].rsplit("/", 1)[-1] == network and subnetwork in (None, resource["name"])
        )
        return next(matching, None)

    def region_quotas(self, region: str) -> dict[str, RegionQuota]:
        """Return Compute Engine's quotas of a region by name, such as IN_USE_ADDRESSES."""
        resource = self._access.get(f"asking for the quotas of {region}", self._compute(f"regions/{region}"))
        return {
            quota["metric"]: RegionQuota(int(quota["limit"]), int(quota["usage"]))
            for quota in resource.get("quotas", ())
        }

    def machine_types(self, zone: str) -> tuple[str, ...]:
        """Return the machine types that a zone offers to this project."""
        url = self._compute(f"zones/{zone}/machineTypes")
        types = self._list_all(f"listing the machine types of {zone}", url, "items", {"maxResults": "500"})
        return tuple(sorted(resource["name"] for resource in types))

    def has_image(self, image: str) -> bool:
        """Return whether Compute Engine has an image PROJECT/FAMILY."""
        owner, _, family = image.partition("/")
        path = f"compute/v1/projects/{owner}/global/images/family/{family}"
        try:
            self._access.get(f"looking for image {image}", self._access.url(COMPUTE_HOST, path))
        except NotFound:
            return False
        return True

    def has_nat(self, network: str, region: str) -> bool:
        """Return whether Cloud NAT connects machines without external addresses to the internet."""
        routers = self._list_all(
            f"asking for Cloud NAT of network {network}", self._compute(f"regions/{region}/routers"), "items", {}
        )
        return any(router.get("nats") and router["network"].rsplit("/", 1)[-1] == network for router in routers)

    def rules(self) -> tuple[firewall.Rule, ...]:
        """Return the enabled rules for incoming traffic of all networks."""
        resources = self._list_all("asking for firewall rules", self._compute("global/firewalls"), "items", {})
        return tuple(rule for resource in resources if (rule := firewall.rule_from_firewall(resource)))

    def make_rule(self, rule: firewall.Rule) -> None:
        body = {
            "name": rule.name,
            "network": f"projects/{self.id}/global/networks/{rule.network}",
            "description": rule.description,
            "direction": "INGRESS",
            "allowed": [{"IPProtocol": protocol, "ports": ports} for protocol, ports in rule.allowed],
            "sourceRanges": rule.ranges,
            "sourceTags": rule.source_tags,
            "targetTags": rule.target_tags,
        }
        body = {key: value for key, value in body.items() if value}
        self._make(f"making firewall rule {rule.name}", "global/firewalls", body)

    def default_account(self) -> str | None:
        """Return the project's default service account, or None."""
        url = self._access.url(COMPUTE_HOST, f"compute/v1/projects/{self.id}")
        return self._access.get("asking for the project", url).get("defaultServiceAccount")

    def forces_os_login(self) -> bool:
        """Return whether an organisation's policy forces OS Login on all machines of the project."""
        doing = "asking for the organisation's policy on OS Login"
        url = self._access.url("cloudresourcemanager.googleapis.com", f"v1/projects/{self.id}:getEffectiveOrgPolicy")
        body = {"constraint": "constraints/compute.requireOsLogin"}
        policy = self._access.call_with_retries(doing, lambda: self._access.rest("POST", url, {}, json=body).json())
        return bool(policy.get("booleanPolicy", {}).get("enforced"))

    @property
    def _buckets(self) -> str:
        return self._access.url(STORAGE_HOST, "storage/v1/b")

    def _compute(self, path: str) -> str:
        return self._access.url(COMPUTE_HOST, f"compute/v1/projects/{self.id}/{path}")

    def _make(self, doing: str, path: str, resource: Mapping[str, Any]) -> None:
        self._wait_for(doing, self._access.post(doing, self._compute(path), resource)["name"])

    def _remove(self, doing: str, path: str) -> None:
        url = self._compute(path)
        answer = self._access.call_once(doing, lambda: self._access.rest("DELETE", url, {}).json())
        self._wait_for(doing, answer["name"])

    def _wait_for(self, doing: str, name: str) -> None:
        def is_done() -> bool:
            operation = self._access.get(doing, self._compute(f"global/operations/{name}"))
            if answer := answer_from_operation(operation):
                raise cloud_error_for(answer, doing, self.id)
            return bool(operation["status"] == "DONE")

        wait_until(doing, is_done)

    def _list_all(self, doing: str, url: str, key: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        pages = self._access.get_pages(doing, url, **query)
        return [resource for page in pages for resource in page.get(key, ())]


def _is_in(machine: Mapping[str, Any], network: str) -> bool:
    """Whether a node or instance is in a network."""
    interfaces = (machine.get("networkConfig", {}), *machine.get("networkInterfaces", ()))
    return any(str(interface.get("network", "")).rsplit("/", 1)[-1] == network for interface in interfaces)


def _has_account(machine: Mapping[str, Any], account: str) -> bool:
    """Whether a node or instance acts as a service account."""
    accounts = (machine.get("serviceAccount", {}), *machine.get("serviceAccounts", ()))
    return any(one.get("email") == account for one in accounts)
