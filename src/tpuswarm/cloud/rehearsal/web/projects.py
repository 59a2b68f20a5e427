"""Projects: every name is one. Cloud Resource Manager, Cloud Billing, Service Usage and Cloud Quotas ask about them."""

import secrets
import zlib
from typing import Any

from tpuswarm.cloud.rehearsal.common.call import Call
from tpuswarm.cloud.rehearsal.common.records import Records, Table
from tpuswarm.cloud.rehearsal.common.refused import INVALID_ARGUMENT, NOT_FOUND, Refused
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.weather import Weather, billing_disabled, service_disabled
from tpuswarm.cloud.rehearsal.tpu.offers import offered

ENABLE_S = 15
TITLES = {
    "cloudbilling.googleapis.com": "Cloud Billing API",
    "cloudquotas.googleapis.com": "Cloud Quotas API",
    "cloudresourcemanager.googleapis.com": "Cloud Resource Manager API",
    "compute.googleapis.com": "Compute Engine API",
    "iam.googleapis.com": "Identity and Access Management (IAM) API",
    "serviceusage.googleapis.com": "Service Usage API",
    "storage.googleapis.com": "Cloud Storage API",
    "tpu.googleapis.com": "Cloud TPU API",
}
"""All services that there are."""
OFF_WHEN_NEW = ("cloudquotas.googleapis.com", "compute.googleapis.com", "tpu.googleapis.com")
PROJECT_FAULTS = {
    "no-billing": "has no billing account linked to it",
    "no-apis": "has the APIs off that a new project has off: TPU, Compute Engine, quotas",
    "os-login": "belongs to an organisation that wants OS Login on all machines",
}
"""What may be wrong with a project."""
ACCOUNT = "billingAccounts/000000-000000-000000"


class Projects:
    """What is known of each, by id."""

    def __init__(self, records: Records, timetable: Timetable, weather: Weather):
        self._table: Table[dict[str, Any]] = records.table("project")
        self._operations: Table[dict[str, Any]] = records.table("service operation")
        self._timetable, self._weather = timetable, weather
        timetable.on("services enabled", self._enabled)

    def set(self, project: str, fault: str, wrong: bool) -> None:
        """Let a project be so, or no longer."""
        known = self._known(project)
        if fault == "no-billing":
            known["billing"] = not wrong
        elif fault == "os-login":
            known["os_login"] = wrong
        else:
            known["off"] = list(OFF_WHEN_NEW) if wrong else []
        self._table.put(project, known)

    def check(self, project: str, service: str) -> None:
        """Raises Refused where a service is off in a project, or nobody pays for it."""
        known = self._known(project)
        if service in known["off"]:
            raise service_disabled(project, service, TITLES[service])
        if not known["billing"]:
            raise billing_disabled(project)

    def _known(self, project: str) -> dict[str, Any]:
        return dict(self._table.get(project) or {"billing": True, "off": []})

    # Cloud Resource Manager.

    def get(self, call: Call) -> dict[str, Any]:
        """projects.get of v1 and v3."""
        project = call.path["project"]
        number = str(10**11 + zlib.crc32(project.encode()))
        if "v3" in call.path.get("version", ""):
            return {"name": f"projects/{number}", "projectId": project, "state": "ACTIVE", "displayName": project}
        return {"projectNumber": number, "projectId": project, "lifecycleState": "ACTIVE", "name": project}

    def permissions(self, call: Call) -> dict[str, Any]:
        """projects.testIamPermissions: the owner may do everything."""
        return {"permissions": call.body.get("permissions", [])}

    def policy(self, call: Call) -> dict[str, Any]:
        """projects.getEffectiveOrgPolicy of v1: of a constraint that nobody set the policy is empty."""
        constraint = call.body.get("constraint", "")
        forced = constraint == "constraints/compute.requireOsLogin" and self._known(call.path["project"]).get(
            "os_login"
        )
        return {"constraint": constraint, "booleanPolicy": {"enforced": True} if forced else {}}

    # Cloud Billing.

    def billing(self, call: Call) -> dict[str, Any]:
        """projects.getBillingInfo."""
        project = call.path["project"]
        linked = self._known(project)["billing"]
        return {
            "name": f"projects/{project}/billingInfo",
            "projectId": project,
            "billingAccountName": ACCOUNT if linked else "",
            "billingEnabled": linked,
        }

    def link_billing(self, call: Call) -> dict[str, Any]:
        """projects.updateBillingInfo."""
        self.set(call.path["project"], "no-billing", not call.body.get("billingAccountName"))
        return self.billing(call)

    def billing_accounts(self, call: Call) -> dict[str, Any]:
        """billingAccounts.list."""
        return {"billingAccounts": [{"name": ACCOUNT, "open": True, "displayName": "Rehearsal"}]}

    # Service Usage.

    def service(self, call: Call) -> dict[str, Any]:
        """services.get."""
        return self._service(call.path["project"], call.path["service"])

    def services(self, call: Call) -> dict[str, Any]:
        """services.list."""
        found = [self._service(call.path["project"], name) for name in TITLES]
        if wanted := call.query.get("filter", "").removeprefix("state:"):
            found = [each for each in found if each["state"] == wanted]
        return {"services": found}

    def some_services(self, call: Call, names: list[str]) -> dict[str, Any]:
        """services.batchGet."""
        return {"services": [self._service(call.path["project"], name.rsplit("/", 1)[-1]) for name in names]}

    def enable(self, call: Call) -> dict[str, Any]:
        """services.enable and services.batchEnable."""
        project = call.path["project"]
        names = [call.path["service"]] if "service" in call.path else call.body.get("serviceIds", [])
        for name in names:
            self._service(project, name)
        operation = f"operations/acat.p2-{secrets.token_hex(12)}"
        self._operations.put(operation, {"name": operation, "done": False})
        self._timetable.after(ENABLE_S, "services enabled", operation, project, names)
        return self._operations[operation]

    def operation(self, call: Call) -> dict[str, Any]:
        """operations.get."""
        found = self._operations.get(f"operations/{call.path['name']}")
        if found is None:
            raise Refused(NOT_FOUND, f"Operation operations/{call.path['name']} was not found.")
        return found

    def _enabled(self, operation: str, project: str, names: list[str]) -> None:
        known = self._known(project)
        known["off"] = [each for each in known["off"] if each not in names]
        self._table.put(project, known)
        services = [self._service(project, name) for name in names]
        kind = "type.googleapis.com/google.api.serviceusage.v1.BatchEnableServicesResponse"
        answer = {"@type": kind, "services": services}
        self._operations.put(operation, {"name": operation, "done": True, "response": answer})

    def _service(self, project: str, name: str) -> dict[str, Any]:
        if name not in TITLES:
            raise Refused(INVALID_ARGUMENT, f"Not found or permission denied for service(s): {name}.")
        off = name in self._known(project)["off"]
        return {
            "name": f"projects/{project}/services/{name}",
            "config": {"name": name, "title": TITLES[name]},
            "state": "DISABLED" if off else "ENABLED",
            "parent": f"projects/{project}",
        }

    # Cloud Quotas.

    def quotas(self, call: Call) -> dict[str, Any]:
        """quotaInfos.list; -1: as many as there are."""
        project, service = call.path["project"], call.path["service"]
        self.check(project, "cloudquotas.googleapis.com")
        limits = self._weather.limits(offered()) if service == "tpu.googleapis.com" else {}
        parent = f"projects/{project}/locations/global/services/{service}/quotaInfos"
        return {
            "quotaInfos": [
                {
                    "name": f"{parent}/{name}",
                    "quotaId": name,
                    "service": service,
                    "containerType": "PROJECT",
                    "dimensions": ["zone"],
                    "dimensionsInfos": [
                        {"dimensions": {"zone": zone}, "details": {"value": str(limit)}, "applicableLocations": [zone]}
                        for zone, limit in by_zone.items()
                    ],
                }
                for name, by_zone in sorted(limits.items())
            ]
        }
