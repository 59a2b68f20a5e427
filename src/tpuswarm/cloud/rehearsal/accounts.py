"""Serve IAM, its access tokens, and the policies of projects and buckets."""

import datetime
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpuswarm.cloud.rehearsal.common.api import ALREADY_EXISTS, NOT_FOUND, Call, Handler, Refused
from tpuswarm.cloud.rehearsal.common.policies import GET_TOKEN, Policies, default_account
from tpuswarm.cloud.rehearsal.wire.rest import Answer, parse_call, routes

ACCOUNTS = "/v1/projects/{project}/serviceAccounts"
BUCKET_POLICY = "/storage/v1/b/{bucket}/iam"
Json = dict[str, Any]


class Accounts:
    """Service accounts, and policies of three kinds of resources."""

    def __init__(self, policies: Policies, find_bucket: Callable[[str], Json], token: str):
        """find_bucket: raises Rejected if there is no such bucket."""
        self._policies, self._find_bucket, self._token = policies, find_bucket, token

    def routes(self, answer: Answer) -> list[Route]:
        async def test_bucket(request: Request) -> Response:
            call, permissions = await parse_call(request), request.query_params.getlist("permissions")
            return JSONResponse(answer(self._test, call._replace(body={"permissions": permissions})))

        table: list[tuple[str, str, Handler]] = [
            ("POST", ACCOUNTS, self._create),
            ("POST", ACCOUNTS + "/{account}:generateAccessToken", self._make_token),
            ("GET", ACCOUNTS + "/{account}", self._get),
            ("DELETE", ACCOUNTS + "/{account}", self._delete),
            ("GET", BUCKET_POLICY, self._get_policy),
            ("PUT", BUCKET_POLICY, self._set_policy),
        ]
        for path in (ACCOUNTS + "/{account}", "/v1/projects/{project}", "/v3/projects/{project}"):
            table += [
                ("POST", path + ":getIamPolicy", self._get_policy),
                ("POST", path + ":setIamPolicy", self._set_policy),
                ("POST", path + ":testIamPermissions", self._test),
            ]
        return [Route(BUCKET_POLICY + "/testPermissions", test_bucket, methods=["GET"]), *routes(answer, table)]

    def _create(self, call: Call) -> Json:
        project, name = call.path["project"], call.body["accountId"]
        self._policies.check(call.caller, "iam.serviceAccounts.create", f"projects/{project}")
        short, _, domain = project.rpartition(":")[::-1]
        email = f"{name}@{short}{'.' * bool(domain)}{domain}.iam.gserviceaccount.com"
        if email in self._policies.accounts:
            raise Refused(ALREADY_EXISTS, f"Service account {name} already exists within project projects/{project}.")
        fields = {"displayName": call.body.get("serviceAccount", {}).get("displayName", "")}
        account = {
            "name": f"projects/{project}/serviceAccounts/{email}",
            "projectId": project,
            "email": email,
            **fields,
        }
        self._policies.add_account(email, account)
        return account

    def _get(self, call: Call) -> Json:
        project, email = call.path["project"], call.path["account"]
        if email == default_account(project):
            return {"name": f"projects/{project}/serviceAccounts/{email}", "projectId": project, "email": email}
        account = self._policies.accounts.get(email)
        if account is None or project not in ("-", account["projectId"]):
            raise Refused(NOT_FOUND, f"Unknown service account {email}")
        return {key: value for key, value in account.items() if key != "exists"}

    def _delete(self, call: Call) -> Json:
        email = self._get(call)["email"]
        self._policies.check(call.caller, "iam.serviceAccounts.delete", f"projects/{call.path['project']}")
        self._policies.remove_account(email)
        return {}

    def _make_token(self, call: Call) -> Json:
        email = call.path["account"]
        project = (self._policies.accounts.get(email) or {}).get("projectId", "")
        if not self._policies.allow(call.caller, GET_TOKEN, f"accounts/{email}", f"projects/{project}"):
            self._policies.check(call.caller, GET_TOKEN, f"accounts/{email}")
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
        return {"accessToken": f"{self._token}~{email}", "expireTime": expires.isoformat(timespec="seconds")}

    def _resources(self, call: Call) -> list[str]:
        """Return the resource of a call, and the project whose policy it inherits."""
        if "bucket" in call.path:
            bucket = self._find_bucket(call.path["bucket"])
            return [f"buckets/{bucket['name']}", f"projects/{bucket['project']}"]
        project = [f"projects/{call.path['project']}"]
        if "account" not in call.path:
            return project
        email = call.path["account"]
        if email in self._policies.accounts and not self._policies.accounts[email]["exists"]:
            raise Refused(NOT_FOUND, f"Unknown service account {email}")
        return [f"accounts/{email}", *project]

    def _get_policy(self, call: Call) -> Json:
        return self._policies.get(self._resources(call)[0])

    def _set_policy(self, call: Call) -> Json:
        resource, *_ = self._resources(call)
        service = {"projects": "resourcemanager.projects", "buckets": "storage.buckets"}
        kind = service.get(resource.partition("/")[0], "iam.serviceAccounts")
        self._policies.check(call.caller, f"{kind}.setIamPolicy", resource)
        return self._policies.set(resource, call.body if "bucket" in call.path else call.body["policy"])

    def _test(self, call: Call) -> Json:
        resources = self._resources(call)
        permissions = call.body.get("permissions", [])
        allowed = [name for name in permissions if self._policies.allow(call.caller, name, *resources)]
        return {"permissions": allowed} if allowed else {}
