"""Projects for Cloud Resource Manager, Cloud Billing, Service Usage and Cloud Quotas. Every project id exists."""

import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpuswarm.cloud.rehearsal.common.api import INVALID_ARGUMENT, NOT_FOUND, Call, Handler, Refused
from tpuswarm.cloud.rehearsal.common.policies import project_number
from tpuswarm.cloud.rehearsal.common.records import Records, Table
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.zone_faults import ZoneFaults, billing_disabled, service_disabled
from tpuswarm.cloud.rehearsal.compute.tpus import list_quotas
from tpuswarm.cloud.rehearsal.tpu.offers import list_offers
from tpuswarm.cloud.rehearsal.wire.rest import Answer, parse_call, routes

ENABLE_S = 15
PATH = "/v1/projects/{project}"
SERVICES = {
    "cloudbilling.googleapis.com": "Cloud Billing API",
    "cloudquotas.googleapis.com": "Cloud Quotas API",
    "cloudresourcemanager.googleapis.com": "Cloud Resource Manager API",
    "compute.googleapis.com": "Compute Engine API",
    "iam.googleapis.com": "Identity and Access Management (IAM) API",
    "iamcredentials.googleapis.com": "IAM Service Account Credentials API",
    "serviceusage.googleapis.com": "Service Usage API",
    "storage.googleapis.com": "Cloud Storage API",
    "tpu.googleapis.com": "Cloud TPU API",
}
"""Titles by service."""
OFF_IN_NEW_PROJECTS = (
    *("cloudquotas.googleapis.com", "cloudresourcemanager.googleapis.com", "compute.googleapis.com"),
    *("iam.googleapis.com", "iamcredentials.googleapis.com", "tpu.googleapis.com"),
)
PROJECT_FAULTS = {
    "no-billing": "has no billing account linked to it",
    "no-apis": "has the APIs off that a new project has off: TPU, Compute Engine, IAM, quotas",
    "os-login": "belongs to an organisation that wants OS Login on all machines",
    "no-roles": "belongs to an organisation whose default service accounts have no role",
}
BILLING_ACCOUNT = "billingAccounts/000000-000000-000000"
Json = dict[str, Any]


class Projects:
    """Settings of each project by id: billing, services that are off, OS Login."""

    def __init__(self, records: Records, timetable: Timetable, zone_faults: ZoneFaults):
        self._table: Table[Json] = records.table("project")
        self._operations: Table[Json] = records.table("service operation")
        self._timetable, self._zone_faults = timetable, zone_faults
        timetable.register("services enabled", self._finish_enabling)

    def set_fault(self, project: str, fault: str, is_planted: bool) -> None:
        settings = self._settings(project)
        if fault == "no-billing":
            settings["billing"] = not is_planted
        elif fault in ("os-login", "no-roles"):
            settings[fault] = is_planted
        else:
            settings["off"] = list(OFF_IN_NEW_PROJECTS) if is_planted else []
        self._table.put(project, settings)

    def gives_default_role(self, project: str) -> bool:
        """Return whether the project's default service account is an editor."""
        return not self._settings(project).get("no-roles")

    def check(self, project: str, service: str) -> None:
        """Raise Refused if a service is off in a project, or the project has no billing account."""
        settings = self._settings(project)
        if service in settings["off"]:
            raise service_disabled(project, service, SERVICES[service])
        if not settings["billing"]:
            raise billing_disabled(project)

    def routes(self, answer: Answer) -> list[Route]:
        async def get_services(request: Request) -> Response:
            call, names = await parse_call(request), request.query_params.getlist("names")
            return JSONResponse(answer(self._get_services, call, names))

        table: list[tuple[str, str, Handler]] = [
            ("POST", PATH + ":getEffectiveOrgPolicy", self._get_policy),
            ("GET", PATH, self._get),
            ("GET", "/v3/projects/{project}", self._get_v3),
            ("GET", f"{PATH}/billingInfo", self._get_billing),
            ("PUT", f"{PATH}/billingInfo", self._link_billing),
            ("GET", "/v1/billingAccounts", self._list_billing_accounts),
            ("POST", PATH + "/services/{service}:enable", self._enable),
            ("POST", PATH + "/services:batchEnable", self._enable),
            ("GET", PATH + "/services/{service}", self._get_service),
            ("GET", f"{PATH}/services", self._list_services),
            ("GET", "/v1/operations/{name}", self._get_operation),
            ("GET", PATH + "/locations/global/services/{service}/quotaInfos", self._list_quotas),
        ]
        return [Route(PATH + "/services:batchGet", get_services, methods=["GET"]), *routes(answer, table)]

    def _settings(self, project: str) -> Json:
        return dict(self._table.get(project) or {"billing": True, "off": []})

    # Cloud Resource Manager.

    def _get(self, call: Call) -> Json:
        project = call.path["project"]
        number = project_number(project)
        return {"projectNumber": number, "projectId": project, "lifecycleState": "ACTIVE", "name": project}

    def _get_v3(self, call: Call) -> Json:
        project = call.path["project"]
        name = f"projects/{project_number(project)}"
        return {"name": name, "projectId": project, "state": "ACTIVE", "displayName": project}

    def _get_policy(self, call: Call) -> Json:
        constraint = call.body.get("constraint", "")
        has_os_login = self._settings(call.path["project"]).get("os-login")
        is_enforced = constraint == "constraints/compute.requireOsLogin" and has_os_login
        return {"constraint": constraint, "booleanPolicy": {"enforced": True} if is_enforced else {}}

    # Cloud Billing.

    def _get_billing(self, call: Call) -> Json:
        project = call.path["project"]
        is_linked = self._settings(project)["billing"]
        return {
            "name": f"projects/{project}/billingInfo",
            "projectId": project,
            "billingAccountName": BILLING_ACCOUNT if is_linked else "",
            "billingEnabled": is_linked,
        }

    def _link_billing(self, call: Call) -> Json:
        self.set_fault(call.path["project"], "no-billing", not call.body.get("billingAccountName"))
        return self._get_billing(call)

    def _list_billing_accounts(self, call: Call) -> Json:
        return {"billingAccounts": [{"name": BILLING_ACCOUNT, "open": True, "displayName": "Rehearsal"}]}

    # Service Usage.

    def _get_service(self, call: Call) -> Json:
        return self._service(call.path["project"], call.path["service"])

    def _list_services(self, call: Call) -> Json:
        services = [self._service(call.path["project"], name) for name in SERVICES]
        if state := call.query.get("filter", "").removeprefix("state:"):
            services = [service for service in services if service["state"] == state]
        return {"services": services}

    def _get_services(self, call: Call, names: list[str]) -> Json:
        return {"services": [self._service(call.path["project"], name.rsplit("/", 1)[-1]) for name in names]}

    def _enable(self, call: Call) -> Json:
        project = call.path["project"]
        names = [call.path["service"]] if "service" in call.path else call.body.get("serviceIds", [])
        for name in names:
            self._service(project, name)
        operation = f"operations/acat.p2-{secrets.token_hex(12)}"
        self._operations.put(operation, {"name": operation, "done": False})
        self._timetable.schedule(ENABLE_S, "services enabled", operation, project, names)
        return self._operations[operation]

    def _get_operation(self, call: Call) -> Json:
        operation = self._operations.get(f"operations/{call.path['name']}")
        if operation is None:
            raise Refused(NOT_FOUND, f"Operation operations/{call.path['name']} was not found.")
        return operation

    def _finish_enabling(self, operation: str, project: str, names: list[str]) -> None:
        settings = self._settings(project)
        settings["off"] = [name for name in settings["off"] if name not in names]
        self._table.put(project, settings)
        services = [self._service(project, name) for name in names]
        message_type = "type.googleapis.com/google.api.serviceusage.v1.BatchEnableServicesResponse"
        response = {"@type": message_type, "services": services}
        self._operations.put(operation, {"name": operation, "done": True, "response": response})

    def _service(self, project: str, name: str) -> Json:
        if name not in SERVICES:
            raise Refused(INVALID_ARGUMENT, f"Not found or permission denied for service(s): {name}.")
        return {
            "name": f"projects/{project}/services/{name}",
            "config": {"name": name, "title": SERVICES[name]},
            "state": "DISABLED" if name in self._settings(project)["off"] else "ENABLED",
            "parent": f"projects/{project}",
        }

    # Cloud Quotas.

    def _list_quotas(self, call: Call) -> Json:
        project, service = call.path["project"], call.path["service"]
        self.check(project, "cloudquotas.googleapis.com")
        is_compute = service == "compute.googleapis.com"
        limits = list_quotas(self._zone_faults) if is_compute else self._zone_faults.quota_infos(list_offers())
        parent = f"projects/{project}/locations/global/services/{service}/quotaInfos"
        return {
            "quotaInfos": [
                {
                    "name": f"{parent}/{name}",
                    "quotaId": name,
                    "service": service,
                    "containerType": "PROJECT",
                    "dimensionsInfos": [
                        {"dimensions": dict(dimensions), "details": {"value": str(limit)}}
                        for dimensions, limit in sorted(limit_by_place.items())
                    ],
                }
                for name, limit_by_place in sorted(limits.items())
            ]
        }
