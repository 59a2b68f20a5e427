"""Paths of the small APIs."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.call import Call, Handler
from tpuswarm.cloud.rehearsal.wire.rest import call_of, routes

PROJECT = "/v1/projects/{project}"


def project_routes(cloud: Cloud) -> list[Route]:
    """For an application."""
    projects = cloud.projects

    def v3(call: Call) -> object:
        return projects.get(Call({**call.path, "version": "v3"}, call.query, call.body))

    async def some(request: Request) -> Response:
        call, names = await call_of(request), request.query_params.getlist("names")
        return JSONResponse(cloud.answer(projects.some_services, call, names))

    table: list[tuple[str, str, Handler]] = [
        ("POST", PROJECT + ":testIamPermissions", projects.permissions),
        ("POST", "/v3/projects/{project}:testIamPermissions", projects.permissions),
        ("POST", PROJECT + ":getEffectiveOrgPolicy", projects.policy),
        ("GET", PROJECT, projects.get),
        ("GET", "/v3/projects/{project}", v3),
        ("GET", f"{PROJECT}/billingInfo", projects.billing),
        ("PUT", f"{PROJECT}/billingInfo", projects.link_billing),
        ("GET", "/v1/billingAccounts", projects.billing_accounts),
        ("POST", PROJECT + "/services/{service}:enable", projects.enable),
        ("POST", PROJECT + "/services:batchEnable", projects.enable),
        ("GET", PROJECT + "/services/{service}", projects.service),
        ("GET", f"{PROJECT}/services", projects.services),
        ("GET", "/v1/operations/{name}", projects.operation),
        ("GET", PROJECT + "/locations/global/services/{service}/quotaInfos", projects.quotas),
    ]
    return [Route(PROJECT + "/services:batchGet", some, methods=["GET"]), *routes(cloud, table)]
