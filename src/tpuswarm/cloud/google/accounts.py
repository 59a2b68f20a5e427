"""The service account of a fleet's machines: make it, grant it roles, and test what it may do.

In organisations made since May 2024 the default service account has no role:
https://cloud.google.com/resource-manager/docs/secure-by-default-organizations
"""

import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any, NamedTuple
from urllib.parse import urlencode

from tpuswarm.cloud.errors import Denied, Invalid, NotFound, Taken
from tpuswarm.cloud.google.access import Access, wait_until
from tpuswarm.cloud.google.buckets import bucket_url
from tpuswarm.cloud.google.failures import member_of

IAM_HOST, PROJECTS_HOST = "iam.googleapis.com", "cloudresourcemanager.googleapis.com"
MAX_ID_LETTERS = 30
ACT_AS = "iam.serviceAccounts.actAs"
DISPLAY_NAME = "machines of tpuswarm"
"""Marks the accounts that tpuswarm has made: they cannot have labels."""
SLICE_PARTS = ("instanceTemplates", "instanceGroupManagers", "resourcePolicies")
PERMISSIONS_BY_ROLE: dict[str, dict[str, tuple[str, ...]]] = {
    "bucket": {
        "roles/storage.objectAdmin": tuple(f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list")),
        "roles/storage.legacyBucketReader": ("storage.buckets.get",),
    },
    "project": {
        "roles/tpu.admin": tuple(f"tpu.nodes.{verb}" for verb in ("create", "delete", "get", "list", "update")),
        "roles/compute.instanceAdmin.v1": (
            *(f"compute.instances.{verb}" for verb in ("create", "delete", "get", "list", "setMetadata")),
            *("compute.disks.create", "compute.subnetworks.use", "compute.subnetworks.useExternalIp"),
            *(f"compute.{kind}.{verb}" for kind in SLICE_PARTS for verb in ("create", "delete")),
            *("compute.instanceTemplates.list", "compute.instanceGroupManagers.list"),
        ),
    },
    "account": {"roles/iam.serviceAccountUser": (ACT_AS,)},
}
"""What machines need, by resource and by the role that has it: hosts the bucket; the head, whose keeper creates
machines with the same account, all of it: https://cloud.google.com/iam/docs/roles-permissions
"""


class Binding(NamedTuple):
    """A role of a member on the project, the bucket or the service account."""

    resource: str
    role: str
    member: str


class Lack(NamedTuple):
    """A missing role, and its permissions that are needed."""

    binding: Binding
    permissions: tuple[str, ...]


class Grantee(NamedTuple):
    """A service account and what it works with."""

    account: str
    project: str
    bucket: str | None

    def bindings(self, resources: Iterable[str], user: str | None) -> list[Binding]:
        """Return the roles that machines need on `resources`, and the user's, who tests them."""
        member = member_of(self.account)
        needed = [Binding(resource, role, member) for resource in resources for role in PERMISSIONS_BY_ROLE[resource]]
        return [*needed, Binding("account", "roles/iam.serviceAccountTokenCreator", member_of(user))]

    def gcloud(self, binding: Binding) -> str:
        """Return the command that adds a binding."""
        group, name, options = {
            "bucket": ("storage buckets", f"gs://{self.bucket}", []),
            "project": ("projects", self.project, ["--condition=None"]),
            "account": ("iam service-accounts", self.account, [f"--project={self.project}"]),
        }[binding.resource]
        words = ["gcloud", *group.split(), "add-iam-policy-binding", name]
        return shlex.join([*words, f"--member={binding.member}", f"--role={binding.role}", *options])


def account_address(fleet: str, project: str) -> str:
    """Return the address of a fleet's own service account."""
    name = f"tpuswarm-{fleet}"[:MAX_ID_LETTERS].rstrip("-")
    return f"{name}@{_account_domain(project)}"


def _account_domain(project: str) -> str:
    domain, _, short = project.rpartition(":")
    return f"{short}{'.' * bool(domain)}{domain}.iam.gserviceaccount.com"


def create_command(account: str, project: str) -> str:
    return f"gcloud iam service-accounts create {account.partition('@')[0]} --project={project}"


class Accounts:
    """Service accounts of a project. Every method may raise any CloudError."""

    def __init__(self, access: Access):
        self._access = access

    def exists(self, account: str) -> bool:
        return self._find(account) is not None

    def is_own(self, account: str) -> bool:
        """Return whether `make` has made it."""
        return (self._find(account) or {}).get("displayName") == DISPLAY_NAME

    def _find(self, account: str) -> dict[str, Any] | None:
        try:
            return self._access.get(f"looking for service account {account}", self._account_url(account))
        except NotFound:
            return None

    def make(self, account: str) -> None:
        """Make a service account unless it exists. Raises NotFound for an address of another project."""
        project = self._access.project
        if account.partition("@")[2] != _account_domain(project):
            raise NotFound(
                f"project {project} has no service account {account}; name one of its own, or none for a new one"
            )
        url = self._access.url(IAM_HOST, f"v1/projects/{self._access.project}/serviceAccounts")
        body = {"accountId": account.partition("@")[0], "serviceAccount": {"displayName": DISPLAY_NAME}}
        try:
            self._access.post(f"making service account {account}", url, body)
        except Taken:
            if not self.exists(account):
                raise

    def remove(self, grantee: Grantee) -> None:
        """Delete an account, and its roles first, which would stay in the policies for up to 60 days.

        https://cloud.google.com/iam/docs/service-accounts-delete-undelete
        """
        member = member_of(grantee.account)
        for resource in ("bucket", "project") if grantee.bucket else ("project",):
            with suppress(NotFound):  # somebody has deleted the bucket
                self._change_policy(grantee, resource, lambda policy: _remove_member(policy, member))
        url = self._account_url(grantee.account)
        self._access.call_once(
            f"deleting service account {grantee.account}", lambda: self._access.rest("DELETE", url, {})
        )

    def grant(self, grantee: Grantee, bindings: Iterable[Binding]) -> None:
        """Add bindings; others stay. Waits until policies may name a new account."""
        for resource in dict.fromkeys(binding.resource for binding in bindings):
            new = [binding for binding in bindings if binding.resource == resource]

            def is_granted(resource: str = resource, new: list[Binding] = new) -> bool:
                try:
                    self._change_policy(grantee, resource, lambda policy: _add_members(policy, new))
                except (Invalid, NotFound) as error:
                    if isinstance(error, Invalid) and "does not exist" not in str(error):
                        raise
                    return False
                return True

            wait_until(f"granting roles to {grantee.account}", is_granted)

    def _change_policy(self, grantee: Grantee, resource: str, change: Callable[[dict[str, Any]], None]) -> None:
        doing, access = f"changing roles on the {resource}", self._access
        url = self._resource_url(grantee, resource)
        if resource == "bucket":
            policy = access.get(doing, f"{url}/iam", optionsRequestedPolicyVersion="3")
        else:
            body = {"options": {"requestedPolicyVersion": 3}}
            policy = access.call_with_retries(
                doing, lambda: access.rest("POST", f"{url}:getIamPolicy", {}, json=body).json()
            )
        before = deepcopy(policy)
        change(policy)
        if policy == before:
            return
        if resource == "bucket":
            access.call_once(doing, lambda: access.rest("PUT", f"{url}/iam", {}, json=policy))
        else:
            access.post(doing, f"{url}:setIamPolicy", {"policy": policy})

    def missing(self, grantee: Grantee, resources: Iterable[str]) -> list[Lack]:
        """Return what the account lacks on `resources`, by testing every permission as this account.

        Raises Denied if the user may not act as the account.
        """
        access = self._access.impersonate(grantee.account)
        lacks = []
        for resource in resources:
            roles = PERMISSIONS_BY_ROLE[resource]
            allowed = self._test(access, grantee, resource, [name for names in roles.values() for name in names])
            for role, names in roles.items():
                if missing := tuple(name for name in names if name not in allowed):
                    lacks.append(Lack(Binding(resource, role, member_of(grantee.account)), missing))
        return lacks

    def may_use(self, grantee: Grantee) -> bool:
        """Return whether the user may create machines with the account."""
        return ACT_AS in self._test(self._access, grantee, "account", [ACT_AS])

    def wait_for_roles(self, grantee: Grantee, resources: Iterable[str]) -> None:
        """Wait until all roles take effect, which takes some minutes."""

        def have_applied() -> bool:
            try:
                return not self.missing(grantee, resources)
            except (Denied, NotFound):  # the user's own role does not count yet, or the account is new
                return False

        wait_until(f"waiting for the roles of {grantee.account}", have_applied)

    def _test(self, access: Access, grantee: Grantee, resource: str, permissions: list[str]) -> list[str]:
        doing, url = f"testing permissions on the {resource}", self._resource_url(grantee, resource)
        if resource == "bucket":
            query = urlencode({"permissions": permissions}, doseq=True)
            answer = access.get(doing, f"{url}/iam/testPermissions?{query}")
        else:
            body = {"permissions": permissions}
            answer = access.call_with_retries(
                doing, lambda: access.rest("POST", f"{url}:testIamPermissions", {}, json=body).json()
            )
        allowed: list[str] = answer.get("permissions", [])
        return allowed

    def _resource_url(self, grantee: Grantee, resource: str) -> str:
        if resource == "bucket":
            return bucket_url(self._access, grantee.bucket or "")
        if resource == "project":
            return self._access.url(PROJECTS_HOST, f"v1/projects/{grantee.project}")
        return self._account_url(grantee.account)

    def _account_url(self, account: str) -> str:
        return self._access.url(IAM_HOST, f"v1/projects/{self._access.project}/serviceAccounts/{account}")


def _add_members(policy: dict[str, Any], new: Iterable[Binding]) -> None:
    bindings = policy.setdefault("bindings", [])
    for _, role, member in new:
        unconditional = (old for old in bindings if old["role"] == role and "condition" not in old)
        if (binding := next(unconditional, None)) is None:
            bindings.append({"role": role, "members": [member]})
        elif member not in binding["members"]:
            binding["members"].append(member)


def _remove_member(policy: dict[str, Any], member: str) -> None:
    bindings = policy.get("bindings", [])
    for binding in bindings:
        binding["members"] = [other for other in binding["members"] if other != member]
    policy["bindings"] = [binding for binding in bindings if binding["members"]]
