"""Turn Google's refusals into our errors. The only place that knows Google's codes, reasons and phrases."""

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
from tpuswarm.cloud.protocol import ADDRESSES, INSTANCES
from tpuswarm.train.storage.credentials import UsedCredentials

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
    "iam.serviceAccounts.getAccessToken": "roles/iam.serviceAccountTokenCreator",
    "iam.serviceAccounts.": "roles/iam.serviceAccountAdmin",
    "billing.": "roles/billing.viewer",
    "resourcemanager.projects.setIamPolicy": "roles/resourcemanager.projectIamAdmin",
    "resourcemanager.": "roles/viewer",
}
"""The smallest predefined role that has a permission, by prefix of the permission; the first match counts.

https://cloud.google.com/iam/docs/roles-permissions
"""
ERRORS_BY_CODE: dict[str, type[CloudError]] = {
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
"""For codes that are not about billing, APIs, zones, quota or permissions; any other code is Unreachable."""
CODES_BY_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "CONDITION_NOT_MET",
    429: "RESOURCE_EXHAUSTED",
}
"""For REST answers without a code name. Server errors (5xx) have none."""
ZONE_LACKS_TYPE = re.compile(
    r"was not found in zone |does not exist in zone '|"
    r"requested zone \"[^\"]+\" is not supported|model is not supported for accelerator type"
)
"""In answers with INVALID_ARGUMENT; other zones may offer the type."""
REGION_LIMIT = re.compile(r"You have reached (\w+) limit")
"""The TPU API's phrase for a quota of Compute Engine, with code 8, 9 or 13."""


@dataclass(frozen=True)
class Answer:
    """A refusal from gRPC, REST or a failed operation."""

    code: str
    """gRPC's name (RESOURCE_EXHAUSTED) or Compute Engine's (ZONE_RESOURCE_POOL_EXHAUSTED)."""
    message: str
    reason: str = ""
    """From ErrorInfo, or the first of REST's `errors`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """From ErrorInfo: permission, service, quota_limit, …"""
    quota: str | None = None
    """From QuotaFailure; empty if it names no quota, None if there is none."""


NO_CREDENTIALS = UsedCredentials()


def cloud_error_for(
    answer: Answer, doing: str, project: str, used: UsedCredentials = NO_CREDENTIALS, project_note: str = ""
) -> CloudError:
    """Return our error, with the action (`doing`), Google's message and the way out.

    project_note: where the project comes from.
    """
    error = _error_for(answer, doing, project, used, project_note)
    error.code = answer.code
    return error


def _error_for(answer: Answer, doing: str, project: str, used: UsedCredentials, project_note: str) -> CloudError:
    text = answer.message.lower()
    message = f"{doing}: {answer.message.strip().rstrip('.')}"
    if answer.code == "UNAUTHENTICATED":
        return NotSignedIn(f"{message}{used.note}; {used.remedy}")
    if answer.code == "CONDITION_NOT_MET":
        return Changed(f"{doing}: somebody else wrote it meanwhile")
    if service := _disabled_api(answer):
        enable = f"`gcloud services enable {service} --project={project}`"
        return Denied(f"{doing}: the API {service} is off in project {project}; turn it on with {enable}")
    if _lacks_billing(answer):
        link = f"`gcloud billing projects link {project} --billing-account=ACCOUNT`"
        accounts = "`gcloud billing accounts list` names yours"
        return Denied(f"{doing}: project {project} has no active billing account; {link}, {accounts}")
    if "free-trial billing account" in text or "free trial" in text:
        return Denied(f"{message}; a free trial has no TPUs: upgrade the billing account in the console")
    if _is_not_offered(answer):
        return NoQuota(f"{message}; use a zone and a type that project {project} was granted")
    if ZONE_LACKS_TYPE.search(answer.message):
        return NoQuota(f"{message}; take this zone out of the pool's `zones`")
    if _is_rate_limit(answer):
        return Unreachable(message)
    if (limit := _quota_name(answer)) is not None:
        return NoQuota(f"{message}; {_quota_remedy(limit, project)}", limit or None)
    if _is_stockout(answer):
        return NoCapacity(message)
    if answer.code in ("PERMISSION_DENIED", "forbidden", "SERVICE_ACCOUNT_ACCESS_DENIED"):
        return _denied_error(answer, f"{message}{used.note}{project_note}", project, used)
    if re.search(rf"projects/{re.escape(project)}\W+(was )?not (be )?found", answer.message):
        return NotFound(f"{message}{project_note}; `gcloud projects list` names yours")
    return ERRORS_BY_CODE.get(answer.code, Unreachable)(message)


def unreachable_error(error: Exception, doing: str) -> CloudError:
    """Return the error for a request that got no answer from Google."""
    cause = next(iter(re.findall(r"(Failed to resolve '[^']+'|Connection refused|timed out)", str(error))), None)
    reason = cause or f"{type(error).__name__}: {error}"
    return Unreachable(f"{doing}: cannot reach Google Cloud ({reason}); is this computer online?")


def sign_in_error(error: Exception, used: UsedCredentials = NO_CREDENTIALS) -> CloudError:
    """Return the error for missing or expired credentials."""
    text = str(error.args[0] if error.args else "")
    first = re.split(r"\n|\. ", text)[0].strip().rstrip(".") or type(error).__name__
    return NotSignedIn(f"not signed in to Google Cloud ({first}){used.note}; {used.remedy}")


def _disabled_api(answer: Answer) -> str | None:
    off = answer.reason in ("SERVICE_DISABLED", "accessNotConfigured")
    if not off and "has not been used in project" not in answer.message:
        return None
    named = re.search(r"[a-z]+\.googleapis\.com", re.sub(r"console\.\w+\.google\S*?/api/", "", answer.message))
    return answer.metadata.get("service") or (named[0] if named else "of that service")


def _lacks_billing(answer: Answer) -> bool:
    reasons = ("BILLING_DISABLED", "UREQ_PROJECT_BILLING_NOT_FOUND", "UREQ_PROJECT_BILLING_NOT_OPEN", "accountDisabled")
    phrases = (
        "requires billing to be enabled",
        "billing must be enabled",
        "has billing disabled",
        "billing account for",
    )
    return answer.reason in reasons or any(phrase in answer.message.lower() for phrase in phrases)


def _is_not_offered(answer: Answer) -> bool:
    phrases = (
        "is not found or access is unauthorized",
        "permission denied on 'locations/",
        "does not have permission to submit requests for accelerator type",
    )
    return answer.reason == "LOCATION_POLICY_VIOLATED" or any(phrase in answer.message.lower() for phrase in phrases)


def _is_rate_limit(answer: Answer) -> bool:
    """Return whether there were too many requests, not machines; both have the reason RATE_LIMIT_EXCEEDED."""
    limit = f"{answer.metadata.get('quota_limit', '')} {answer.quota or ''} {answer.message}".lower().replace(" ", "")
    codes = ("rateLimitExceeded", "userRateLimitExceeded", "RESOURCE_OPERATION_RATE_EXCEEDED")
    return "perminute" in limit or answer.reason in codes or answer.code in codes


def _quota_name(answer: Answer) -> str | None:
    """Return the name of the exhausted quota, empty if the answer names none; None if it is not about quota."""
    if of_region := REGION_LIMIT.search(answer.message):
        return of_region[1]
    is_quota = answer.code == "RESOURCE_EXHAUSTED" and "quota" in answer.message.lower()
    is_quota = is_quota or answer.quota is not None or "quota_limit" in answer.metadata
    if not is_quota and answer.code != "QUOTA_EXCEEDED" and answer.reason != "quotaExceeded":
        return None
    named = re.search(r"[Qq]uota (?:limit )?'([^']+)'", answer.message)
    return answer.metadata.get("quota_limit") or (named[1] if named else answer.quota or "")


def _quota_remedy(limit: str, project: str) -> str:
    ask = f"request more at {quota_page(project)}"
    if limit == ADDRESSES:
        return (
            f"each host takes one external address of its region: {ask}, use fewer machines or another region, or set "
            "external_ips = false"
        )
    return f"{ask}, or use another {'region' if limit == INSTANCES else 'zone'}"


def member_of(account: str | None) -> str:
    """Return an account as policies and gcloud name it."""
    kind = "serviceAccount" if (account or "").endswith(".gserviceaccount.com") else "user"
    return f"{kind}:{account or 'YOU'}"


def quota_page(project: str) -> str:
    return f"https://console.cloud.google.com/iam-admin/quotas?project={project}"


def _is_stockout(answer: Answer) -> bool:
    phrases = (
        "no more capacity",
        "insufficient reserved capacity",
        "does not have enough resources available",
        "while in state preempted",  # preempted before it was ready
    )
    codes = ("ZONE_RESOURCE_POOL_EXHAUSTED", "STOCKOUT")
    return answer.code.startswith(codes) or any(phrase in answer.message.lower() for phrase in phrases)


def _denied_error(answer: Answer, message: str, project: str, used: UsedCredentials) -> Denied:
    if "insufficient authentication scopes" in answer.message.lower() or "SCOPE" in answer.reason:
        return Denied(f"{message}; the credentials lack a scope: {used.remedy}")
    named = re.search(r"(?:permission '([\w.]+)'|'([\w.]+)' permission)", answer.message, re.IGNORECASE)
    permission = answer.metadata.get("permission") or (named[1] or named[2] if named else None)
    if permission is None and "access to service account" in answer.message:
        permission = "iam.serviceAccounts.actAs"
    # Google spells some permissions in small letters.
    roles = (role for prefix, role in ROLES.items() if (permission or "").lower().startswith(prefix.lower()))
    role = next(roles, None)
    if permission is None or role is None:
        return Denied(f"{message}; an owner of project {project} can give you the role for it", permission)
    member = member_of(used.account)
    bind = f"gcloud projects add-iam-policy-binding {project} --member={member} --role={role}"
    return Denied(
        f"{message}; you need {permission}, which the role {role} has; an owner of the project grants it: `{bind}`",
        permission,
    )
