"""Who may do what: the roles of service accounts on projects, buckets and service accounts."""

import base64
import json
import secrets
import zlib
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from tpuswarm.cloud.rehearsal.common.api import ABORTED, INVALID_ARGUMENT, PERMISSION_DENIED, Refused, Rejected
from tpuswarm.cloud.rehearsal.common.records import Records, Table
from tpuswarm.cloud.rehearsal.common.timetable import Timetable

APPLY_S, NEW_ACCOUNT_S = 60, 20
"""From a change of a policy to its effect, and from the creation of an account to its use in a policy.

https://cloud.google.com/iam/docs/access-change-propagation: typically two minutes, at times seven or more.
"""
USER = "user:you@example.com"
"""The owner of every project."""
GET_TOKEN, ACT_AS = "iam.serviceAccounts.getAccessToken", "iam.serviceAccounts.actAs"
ROLES = {
    "roles/editor": ("tpu.*", "compute.*", "storage.*", ACT_AS),
    "roles/tpu.admin": ("tpu.*",),
    "roles/compute.instanceAdmin.v1": (
        *("compute.instances.*", "compute.disks.*", "compute.subnetworks.use*", "compute.*.get", "compute.*.list"),
        *("compute.instanceTemplates.*", "compute.instanceGroupManagers.*", "compute.resourcePolicies.*"),
    ),
    "roles/storage.admin": ("storage.*",),
    "roles/storage.objectAdmin": ("storage.objects.*",),
    "roles/storage.objectViewer": ("storage.objects.get", "storage.objects.list"),
    "roles/storage.legacyBucketReader": ("storage.buckets.get", "storage.objects.list"),
    "roles/iam.serviceAccountUser": (ACT_AS,),
    "roles/iam.serviceAccountTokenCreator": (GET_TOKEN,),
}
"""Patterns of permissions by role, in short: https://cloud.google.com/iam/docs/roles-permissions."""
Policy = dict[str, Any]


def project_number(project: str) -> str:
    return str(10**11 + zlib.crc32(project.encode()))


def default_account(project: str) -> str:
    return f"{project_number(project)}-compute@developer.gserviceaccount.com"


class Policies:
    """Policies by resource: `projects/P`, `buckets/B` and `accounts/EMAIL`."""

    def __init__(self, records: Records, timetable: Timetable, gives_default_role: Callable[[str], bool]):
        """gives_default_role: whether a project's default service account is an editor."""
        self.accounts: Table[dict[str, Any]] = records.table("service account")
        """By email address; `exists`: whether policies may name it already."""
        self._policies: Table[Policy] = records.table("policy")
        self._applied: Table[Policy] = records.table("applied policy")
        self._timetable, self._gives_default_role = timetable, gives_default_role
        self.find_machine_account: Callable[[str], str] = lambda host_id: ""
        """Returns the account of the machine of a host."""
        timetable.register("policy applied", self._applied.put)
        timetable.register("account exists", self._finish_account)

    def get(self, resource: str) -> Policy:
        return self._policies.get(resource) or self._first_policy(resource)

    def set(self, resource: str, policy: Policy) -> Policy:
        """Replace a policy. Raises Refused if it has changed meanwhile, or names an unknown account."""
        if policy.get("etag") not in (None, self.get(resource)["etag"]):
            raise Refused(
                ABORTED,
                "There were concurrent policy changes. "
                "Please retry the whole read-modify-write with exponential backoff.",
            )
        for binding in policy.get("bindings", ()):
            for member in binding["members"]:
                kind, _, email = member.partition(":")
                known = email.endswith("@developer.gserviceaccount.com") or (self.accounts.get(email) or {}).get(
                    "exists"
                )
                if kind == "serviceAccount" and not known:
                    raise Refused(INVALID_ARGUMENT, f"Service account {email} does not exist.")
        etag = base64.b64encode(secrets.token_hex(6).encode()).decode()
        new = {"version": 1, "etag": etag, "bindings": policy.get("bindings", [])}
        self._policies.put(resource, new)
        self._timetable.schedule(APPLY_S, "policy applied", resource, new)
        return new

    def add_account(self, email: str, account: dict[str, Any]) -> None:
        self.accounts.put(email, {**account, "exists": False})
        self._timetable.schedule(NEW_ACCOUNT_S, "account exists", email)

    def _finish_account(self, email: str) -> None:
        if email in self.accounts:
            self.accounts.put(email, {**self.accounts[email], "exists": True})

    def remove_account(self, email: str) -> None:
        """Delete an account; policies go on naming it, in Google's form for a deleted one."""
        deleted = f"deleted:serviceAccount:{email}?uid=1"
        for table in (self._policies, self._applied):
            table.pop(f"accounts/{email}")
            for resource, policy in table.items():
                text = json.dumps(policy).replace(f'"serviceAccount:{email}"', f'"{deleted}"')
                table.put(resource, json.loads(text))
        self.accounts.pop(email)

    def member(self, caller: str) -> str:
        """Return who calls, by the end of the token: nothing, ~ID of a host, or ~EMAIL of an account."""
        if not caller:
            return USER
        return f"serviceAccount:{caller if '@' in caller else self.find_machine_account(caller)}"

    def allow(self, caller: str, permission: str, *resources: str) -> bool:
        member = self.member(caller)
        if member == USER and permission != GET_TOKEN:
            return True
        bindings = [
            binding
            for resource in resources
            for binding in (self._applied.get(resource) or self._first_policy(resource))["bindings"]
        ]
        return any(
            member in binding["members"] and fnmatchcase(permission, pattern)
            for binding in bindings
            for pattern in ROLES.get(binding["role"], ())
        )

    def check(self, caller: str, permission: str, resource: str) -> None:
        """Raise Refused, as APIs with gRPC do."""
        if not self.allow(caller, permission, resource):
            raise permission_denied(permission)

    def check_use(self, caller: str, account: str, project: str) -> None:
        """Raise Refused unless the caller may give a service account to a machine."""
        if not self.allow(caller, ACT_AS, f"accounts/{account}", f"projects/{project}"):
            raise permission_denied(ACT_AS)

    def check_old(self, caller: str, permission: str, resource: str) -> None:
        """Raise Rejected, as Compute Engine does."""
        if not self.allow(caller, permission, resource):
            raise Rejected(403, "forbidden", f"Required '{permission}' permission for '{resource}'")

    def _first_policy(self, resource: str) -> Policy:
        project = resource.removeprefix("projects/")
        has_editor = resource != project and self._gives_default_role(project)
        members = [f"serviceAccount:{default_account(project)}"]
        bindings = [{"role": "roles/editor", "members": members}] if has_editor else []
        return {"version": 1, "etag": "CAE=", "bindings": bindings}


def permission_denied(permission: str, resource: str = "") -> Refused:
    """Return a refusal in the form that https://github.com/GoogleCloudPlatform/t5x-on-vertex-ai/issues/5 quotes."""
    from google.rpc import error_details_pb2

    named = f" '{resource}'" if resource else ""
    return Refused(
        PERMISSION_DENIED,
        f"Permission '{permission}' denied on resource{named} (or it may not exist).",
        error_details_pb2.ErrorInfo(
            reason="IAM_PERMISSION_DENIED",
            domain="iam.googleapis.com",
            metadata={"permission": permission, "resource": resource},
        ),
    )
