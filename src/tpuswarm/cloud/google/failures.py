"""What Google answers when it refuses, as our own errors. The one place that knows its codes, reasons and phrases."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpuswarm.cloud.errors import (
    Changed,
    CloudError,
    Denied,
    Invalid,
    NoCapacity,
    NoQuota,
    NotFound,
    NotSignedIn,
    Taken,
    Unreachable,
)

SIGN_IN = "`gcloud auth application-default login`"
ROLES = {
    "tpu.": "roles/tpu.admin",
    "compute.firewalls.": "roles/compute.securityAdmin",
    "compute.networks.": "roles/compute.networkAdmin",
    "compute.": "roles/compute.admin",
    "storage.": "roles/storage.admin",
    "serviceusage.services.use": "roles/serviceusage.serviceUsageConsumer",
    "serviceusage.": "roles/serviceusage.serviceUsageAdmin",
    "cloudquotas.": "roles/cloudquotas.viewer",
    "iam.serviceAccounts.actAs": "roles/iam.serviceAccountUser",
    "billing.": "roles/billing.viewer",
    "resourcemanager.": "roles/viewer",
}
"""The smallest predefined role that has a permission, by how the permission begins; the first that fits counts.

https://cloud.google.com/iam/docs/roles-permissions
"""
KINDS: dict[str, type[CloudError]] = {
    "ALREADY_EXISTS": Taken,
    "FAILED_PRECONDITION": Invalid,
    "INVALID_ARGUMENT": Invalid,
    "NOT_FOUND": NotFound,
    "OUT_OF_RANGE": Invalid,
    "RESOURCE_EXHAUSTED": NoCapacity,
    "UNIMPLEMENTED": Invalid,
    # Compute Engine's own, of operations and of REST.
    "RESOURCE_ALREADY_EXISTS": Taken,
    "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE": Invalid,
    "RESOURCE_NOT_FOUND": NotFound,
    "RESOURCE_NOT_READY": Unreachable,
    "UNSUPPORTED_OPERATION": Invalid,
}
"""What is left once billing, APIs, zones, quota and permissions are told apart; anything else is Unreachable."""
HTTP = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "CONDITION_NOT_MET",
    429: "RESOURCE_EXHAUSTED",
}
"""Codes of REST without a name; those of the servers' own faults are none of these."""


@dataclass(frozen=True)
class Answer:
    """A refusal, the same from gRPC, REST and failed operations."""

    code: str
    """gRPC's name (RESOURCE_EXHAUSTED), or Compute Engine's own (ZONE_RESOURCE_POOL_EXHAUSTED)."""
    message: str
    reason: str = ""
    """Of its ErrorInfo, or the first of REST's `errors`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of its ErrorInfo: permission, service, quota_limit, …"""
    quota: str | None = None
    """What its QuotaFailure names; empty where there is one that names nothing."""


def judge(answer: Answer, doing: str, project: str) -> CloudError:
    """The error of ours, with one sentence: what was being done (`doing`), what Google says, the way out."""
    text = answer.message.lower()
    said = f"{doing}: {answer.message.strip().rstrip('.')}"
    if answer.code == "UNAUTHENTICATED":
        return NotSignedIn(f"{said}; sign in with {SIGN_IN}")
    if answer.code == "CONDITION_NOT_MET":
        return Changed(f"{doing}: somebody else wrote it meanwhile")
    if service := _disabled_api(answer):
        enable = f"`gcloud services enable {service} --project={project}`"
        return Denied(f"{doing}: the API {service} is not on in project {project}; turn it on with {enable}")
    if _unpaid(answer):
        link = f"`gcloud billing projects link {project} --billing-account=ACCOUNT`"
        accounts = "`gcloud billing accounts list` names yours"
        return Denied(f"{doing}: no living billing account is linked to project {project}; {link}, {accounts}")
    if "free-trial billing account" in text or "free trial" in text:
        return Denied(f"{said}; a free trial has no TPUs: upgrade the billing account in the console")
    if _not_offered(answer):
        return NoQuota(f"{said}; take a zone and a type that project {project} was granted")
    if _too_fast(answer):
        return Unreachable(said)
    if (limit := _quota(answer)) is not None:
        ask = f"https://console.cloud.google.com/iam-admin/quotas?project={project}"
        return NoQuota(f"{said}; ask for more at {ask}, or take another zone", limit or None)
    if _stockout(answer):
        return NoCapacity(said)
    if answer.code in ("PERMISSION_DENIED", "forbidden", "SERVICE_ACCOUNT_ACCESS_DENIED"):
        return _denied(answer, said, project)
    return KINDS.get(answer.code, Unreachable)(said)


def unreachable(error: Exception, doing: str) -> CloudError:
    """For what failed before Google could answer."""
    cause = next(iter(re.findall(r"(Failed to resolve '[^']+'|Connection refused|timed out)", str(error))), None)
    why = cause or f"{type(error).__name__}: {error}"
    return Unreachable(f"{doing}: Google Cloud cannot be reached ({why}); is this computer online?")


def not_signed_in(error: Exception) -> CloudError:
    """For credentials that are not there or no longer good."""
    first = re.split(r"\n|\. ", str(error))[0].strip().rstrip(".") or type(error).__name__
    return NotSignedIn(f"not signed in to Google Cloud ({first}); sign in with {SIGN_IN}")


def _disabled_api(answer: Answer) -> str | None:
    off = answer.reason in ("SERVICE_DISABLED", "accessNotConfigured")
    if not off and "has not been used in project" not in answer.message:
        return None
    named = re.search(r"[a-z]+\.googleapis\.com", re.sub(r"console\.\w+\.google\S*?/api/", "", answer.message))
    return answer.metadata.get("service") or (named[0] if named else "of that service")


def _unpaid(answer: Answer) -> bool:
    reasons = ("BILLING_DISABLED", "UREQ_PROJECT_BILLING_NOT_FOUND", "UREQ_PROJECT_BILLING_NOT_OPEN", "accountDisabled")
    phrases = (
        "requires billing to be enabled",
        "billing must be enabled",
        "has billing disabled",
        "billing account for",
    )
    return answer.reason in reasons or any(each in answer.message.lower() for each in phrases)


def _not_offered(answer: Answer) -> bool:
    phrases = (
        "is not found or access is unauthorized",
        "permission denied on 'locations/",
        "does not have permission to submit requests for accelerator type",
    )
    return answer.reason == "LOCATION_POLICY_VIOLATED" or any(each in answer.message.lower() for each in phrases)


def _too_fast(answer: Answer) -> bool:
    """Too many requests, not too many machines: RATE_LIMIT_EXCEEDED is the reason of both."""
    limit = f"{answer.metadata.get('quota_limit', '')} {answer.quota or ''} {answer.message}".lower().replace(" ", "")
    codes = ("rateLimitExceeded", "userRateLimitExceeded", "RESOURCE_OPERATION_RATE_EXCEEDED")
    return "perminute" in limit or answer.reason in codes or answer.code in codes


def _quota(answer: Answer) -> str | None:
    """The name of the quota that is used up, empty if the answer does not say which; None if it is not about quota."""
    about = answer.code == "RESOURCE_EXHAUSTED" and "quota" in answer.message.lower()
    about = about or answer.quota is not None or "quota_limit" in answer.metadata
    if not about and answer.code != "QUOTA_EXCEEDED" and answer.reason != "quotaExceeded":
        return None
    named = re.search(r"[Qq]uota (?:limit )?'([^']+)'", answer.message)
    return answer.metadata.get("quota_limit") or (named[1] if named else answer.quota or "")


def _stockout(answer: Answer) -> bool:
    phrases = (
        "no more capacity",
        "insufficient reserved capacity",
        "does not have enough resources available",
        "while in state preempted",  # it was taken away before it was ready
    )
    codes = ("ZONE_RESOURCE_POOL_EXHAUSTED", "STOCKOUT")
    return answer.code.startswith(codes) or any(each in answer.message.lower() for each in phrases)


def _denied(answer: Answer, said: str, project: str) -> Denied:
    if "insufficient authentication scopes" in answer.message.lower() or "SCOPE" in answer.reason:
        return Denied(f"{said}; the credentials in use are too narrow: sign in with {SIGN_IN}")
    named = re.search(r"(?:permission '([\w.]+)'|'([\w.]+)' permission)", answer.message, re.IGNORECASE)
    found = answer.metadata.get("permission") or (named[1] or named[2] if named else None)
    if found is None and "access to service account" in answer.message:
        found = "iam.serviceAccounts.actAs"
    role = next((role for prefix, role in ROLES.items() if found and found.startswith(prefix)), None)
    if found is None or role is None:
        return Denied(f"{said}; an owner of project {project} can give you the role for it", found)
    bind = f"gcloud projects add-iam-policy-binding {project} --member=user:YOU --role={role}"
    return Denied(f"{said}; the role {role} has {found}, an owner of the project gives it: `{bind}`", found)
