"""Serve the JSON API of Cloud Storage, as far as Google's clients use it."""

import json
import re
import secrets
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpuswarm.cloud.rehearsal.common.api import Rejected
from tpuswarm.cloud.rehearsal.common.policies import Policies
from tpuswarm.cloud.rehearsal.storage.bucket_faults import BucketFaults, Endpoint
from tpuswarm.cloud.rehearsal.storage.objects import Condition, Objects, Resource
from tpuswarm.cloud.rehearsal.wire.rest import parse_json, read_caller

MAX_PAGE_ROWS = 1000
RANGE = re.compile(r"bytes=(\d*)-(\d*)")
CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")
Fields = dict[str, "Fields"]
"""Wanted fields by name, each with the wanted fields inside it; empty: all."""


class Storage:
    def __init__(self, objects: Objects, faults: BucketFaults | None = None, policies: Policies | None = None):
        self._objects, self._faults, self._policies = objects, faults, policies
        self._finished_uploads: dict[str, Resource] = {}
        self._uploads: dict[str, tuple[str, str, Resource, Condition, bytearray]] = {}
        """Resumable uploads by id: bucket, name, fields, condition, bytes so far. They end with the server, as Google's
        end after a week; clients start again.
        """

    def routes(self) -> list[Route]:
        bucket, upload = "/storage/v1/b/{bucket}", ["POST", "PUT", "DELETE"]
        objects = ["GET", "HEAD", "PATCH", "PUT", "POST", "DELETE"]
        table: list[tuple[str, Endpoint, list[str]]] = [
            ("/storage/v1/b", self._handle_buckets, ["GET", "POST"]),
            (bucket, self._handle_bucket, ["GET", "PATCH", "PUT", "DELETE"]),
            (bucket + "/storageLayout", self._get_layout, ["GET"]),
            (bucket + "/managedFolders", self._list_managed_folders, ["GET"]),
            (bucket + "/o", self._list_objects, ["GET"]),
            (bucket + "/o/{rest:path}", self._handle_object, objects),
            ("/download/storage/v1/b/{bucket}/o/{rest:path}", self._handle_object, ["GET", "HEAD"]),
            ("/upload/storage/v1/b/{bucket}/o", self._upload, upload),
            ("/resumable/upload/storage/v1/b/{bucket}/o", self._upload, upload),
        ]
        return [Route(path, self._wrap(endpoint), methods=methods) for path, endpoint, methods in table]

    def _wrap(self, endpoint: Endpoint) -> Endpoint:
        wrapped = _with_fields(self._checked(endpoint))
        return self._faults.wrap(wrapped) if self._faults else wrapped

    def _checked(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            if self._policies and (caller := read_caller(request)):
                self._check(self._policies, caller, request)
            return await endpoint(request)

        return answer

    def _check(self, policies: Policies, caller: str, request: Request) -> None:
        """Raise Rejected if the caller lacks the permission for a request."""
        name = request.path_params.get("bucket")
        if name is None:
            resources = [f"projects/{request.query_params.get('project', '')}"]
        else:
            resources = [f"buckets/{name}", f"projects/{self._objects.bucket(name)['project']}"]
        permission = _permission(request)
        if not policies.allow(caller, permission, *resources):
            email = policies.member(caller).partition(":")[2]
            kind = permission.split(".")[1].removesuffix("s")
            raise Rejected(
                403,
                "forbidden",
                f"{email} does not have {permission} access to the Google Cloud Storage {kind}. "
                f"Permission '{permission}' denied on resource (or it may not exist).",
            )

    async def _handle_buckets(self, request: Request) -> Response:
        query = request.query_params
        project = query.get("project", "")
        if request.method == "POST":
            return JSONResponse(self._objects.make_bucket(project, await _parse_fields(request)))
        buckets = self._objects.list_buckets(project, query.get("prefix", ""))
        return JSONResponse({"kind": "storage#buckets", "items": buckets})

    async def _handle_bucket(self, request: Request) -> Response:
        name = request.path_params["bucket"]
        bucket, condition = self._objects.bucket(name), Condition.from_query(dict(request.query_params))
        if request.method == "GET" and condition.is_unchanged(bucket):
            return Response(status_code=304)
        condition.check(bucket)
        if request.method == "DELETE":
            self._objects.delete_bucket(name)
            return Response(status_code=204)
        if request.method in ("PATCH", "PUT"):
            return JSONResponse(self._objects.change_bucket(name, await _parse_fields(request)))
        return JSONResponse(bucket)

    async def _get_layout(self, request: Request) -> Response:
        bucket = self._objects.bucket(request.path_params["bucket"])
        return JSONResponse(
            {
                "kind": "storage#storageLayout",
                "bucket": bucket["name"],
                "location": bucket["location"],
                "locationType": bucket["locationType"],
            }
        )

    async def _list_managed_folders(self, request: Request) -> Response:
        self._objects.bucket(request.path_params["bucket"])
        return JSONResponse({"kind": "storage#managedFolders", "items": []})

    async def _list_objects(self, request: Request) -> Response:
        query = dict(request.query_params)
        if not re.fullmatch(r"\d*", query.get("maxResults", "")):
            raise Rejected(400, "invalid", f"Invalid value for maxResults: '{query['maxResults']}'")
        last_name = query.get("pageToken", "")
        page_rows = min(int(query.get("maxResults") or 0) or MAX_PAGE_ROWS, MAX_PAGE_ROWS)
        items: list[Resource] = []
        folders: list[str] = []
        answer: Resource = {"kind": "storage#objects"}
        for entry in self._objects.list_objects(request.path_params["bucket"], query):
            name = entry if isinstance(entry, str) else entry["name"]
            if name <= last_name:
                continue
            if len(items) + len(folders) == page_rows:
                answer["nextPageToken"] = max([*folders, *(item["name"] for item in items)])
                break
            if isinstance(entry, str):
                folders.append(entry)
            else:
                items.append(entry)
        return JSONResponse({**answer, "items": items, "prefixes": folders})

    async def _handle_object(self, request: Request) -> Response:
        bucket, name, verb = _parse_path(request)
        query = dict(request.query_params)
        condition = Condition.from_query(query)
        if verb:
            return await self._copy_or_compose(request, bucket, name, verb, query)
        if request.method == "DELETE":
            self._objects.find(bucket, name, query.get("generation"))
            self._objects.delete(bucket, name, condition)
            return Response(status_code=204)
        if request.method in ("PATCH", "PUT"):
            return JSONResponse(self._objects.change(bucket, name, await _parse_fields(request), condition))
        resource = self._objects.find(bucket, name, query.get("generation"))
        if condition.is_unchanged(resource):
            return Response(status_code=304)
        condition.check(resource)
        return self._download(request, resource) if query.get("alt") == "media" else JSONResponse(resource)

    def _download(self, request: Request, resource: Resource) -> Response:
        size = int(resource["size"])
        headers = {
            "X-Goog-Hash": f"crc32c={resource['crc32c']},md5={resource['md5Hash']}",
            "X-Goog-Generation": resource["generation"],
            "X-Goog-Metageneration": resource["metageneration"],
            "X-Goog-Storage-Class": resource["storageClass"],
            "X-Goog-Stored-Content-Length": str(size),
            "ETag": resource["etag"],
            "Accept-Ranges": "bytes",
        }
        content_type = resource["contentType"]
        requested = RANGE.fullmatch(request.headers.get("range", ""))
        if not requested or requested[0] == "bytes=-":
            return Response(self._objects.read(resource), 200, headers, content_type)
        first = int(requested[1]) if requested[1] else max(size - int(requested[2]), 0)
        last = min(int(requested[2]), size - 1) if requested[1] and requested[2] else size - 1
        if first >= size:
            raise Rejected(416, "requestedRangeNotSatisfiable", "The requested range cannot be satisfied.")
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return Response(self._objects.read(resource, first, last - first + 1), 206, headers, content_type)

    async def _copy_or_compose(
        self, request: Request, bucket: str, name: str, verb: str, query: dict[str, str]
    ) -> Response:
        body = await _parse_fields(request)
        condition = Condition.from_query(query)
        if verb == "compose":
            sources = body.get("sourceObjects", ())
            if not 1 <= len(sources) <= 32:
                raise Rejected(400, "invalid", "The number of source components must be between 1 and 32.")
            parts = [self._objects.find(bucket, source["name"], source.get("generation")) for source in sources]
            data = b"".join(self._objects.read(part) for part in parts)
            return JSONResponse(self._objects.write(bucket, name, data, body.get("destination") or {}, condition))
        source = self._objects.find(bucket, name, query.get("sourceGeneration"))
        Condition.from_query(query, "ifSource").check(source)
        *to_buckets, to_name = (unquote(part) for part in re.split("/b/|/o/", verb)[1:])
        to_bucket = to_buckets[0] if to_buckets else bucket
        fields = {key: source[key] for key in ("contentType", "metadata") if key in source} | body
        copy = self._objects.write(to_bucket, to_name, self._objects.read(source), fields, condition)
        if verb.startswith("moveTo"):
            self._objects.delete(bucket, name, Condition(match=int(source["generation"])))
        if verb.startswith(("copyTo", "moveTo")):
            return JSONResponse(copy)
        size = copy["size"]
        answer = {"kind": "storage#rewriteResponse", "done": True, "objectSize": size, "totalBytesRewritten": size}
        return JSONResponse({**answer, "resource": copy})

    async def _upload(self, request: Request) -> Response:
        """Take a simple or multipart upload, or begin or continue a resumable one."""
        query = dict(request.query_params)
        bucket, condition = request.path_params["bucket"], Condition.from_query(query)
        if "upload_id" in query:
            return await self._continue_upload(request, query["upload_id"])
        if query.get("uploadType") == "resumable":
            fields = await _parse_fields(request)
            name = query.get("name") or fields.pop("name", "")
            self._objects.check(bucket, name, condition)
            upload_id = secrets.token_hex(16)
            self._uploads[upload_id] = (bucket, name, _writable(fields), condition, bytearray())
            url = f"http://{request.headers['host']}{request.url.path}?uploadType=resumable&upload_id={upload_id}"
            return Response(status_code=200, headers={"Location": url, "X-GUploader-UploadID": upload_id})
        if query.get("uploadType") not in ("media", "multipart"):
            raise Rejected(400, "badRequest", f"Invalid upload type: '{query.get('uploadType', '')}'")
        data = await request.body()
        fields = {"contentType": request.headers.get("content-type", "application/octet-stream")}
        if query.get("uploadType") == "multipart":
            fields, data = _split_multipart(request.headers.get("content-type", ""), data)
        name = query.get("name") or fields.pop("name", "")
        return JSONResponse(self._objects.write(bucket, name, data, _writable(fields) | _hashes(request), condition))

    async def _continue_upload(self, request: Request, upload_id: str) -> Response:
        if upload_id in self._finished_uploads:
            return JSONResponse(self._finished_uploads[upload_id])
        if upload_id not in self._uploads:
            raise Rejected(404, "notFound", "No such upload; start again.")
        bucket, name, fields, condition, data = self._uploads[upload_id]
        if request.method == "DELETE":
            del self._uploads[upload_id]
            return Response(status_code=499)
        position = CONTENT_RANGE.fullmatch(request.headers.get("content-range", ""))
        chunk = await request.body()
        if chunk and (not position or not position[1] or int(position[1]) <= len(data)):
            # Clients send bytes again that were not acknowledged.
            data[int(position[1]) if position and position[1] else 0 :] = chunk
        if position and (position[2] == "*" or int(position[2]) > len(data)):
            return Response(status_code=308, headers={"Range": f"bytes=0-{len(data) - 1}"} if data else {})
        resource = self._objects.write(bucket, name, bytes(data), fields | _hashes(request), condition)
        del self._uploads[upload_id]
        self._finished_uploads[upload_id] = resource
        return JSONResponse(resource)


def _permission(request: Request) -> str:
    """Return the permission for a request: https://cloud.google.com/storage/docs/access-control/iam-json."""
    path, method = request.url.path, request.method
    if "bucket" not in request.path_params:
        return f"storage.buckets.{'create' if method == 'POST' else 'list'}"
    if "/upload/" in path or method == "POST":
        return "storage.objects.create"
    action = {"GET": "get", "HEAD": "get", "DELETE": "delete"}.get(method, "update")
    if re.fullmatch(r".*/b/[^/]+(/storageLayout)?", path):
        return f"storage.buckets.{action}"
    return "storage.objects.list" if path.endswith(("/o", "/managedFolders")) else f"storage.objects.{action}"


def _parse_path(request: Request) -> tuple[str, str, str]:
    """Return bucket, object and verb. In the raw path, an object's name is one part."""
    path = request.scope.get("raw_path", request.url.path.encode()).decode().split("?")[0]
    bucket, name = path.split("/b/", 1)[1].split("/o/", 1)
    name, _, verb = name.partition("/")
    if verb and not re.match(r"(rewriteTo|copyTo)/b/|moveTo/o/|compose$", verb):  # a client that does not quote
        name, verb = f"{name}/{verb}", ""
    return unquote(bucket), unquote(name), verb


def _split_multipart(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return an object's fields and its bytes."""
    boundary = re.search(r"""boundary=['"]?([^'";]+)""", content_type)
    if not boundary:
        raise Rejected(400, "invalid", "Multipart must have a boundary.")
    separator = b"--" + boundary[1].encode()
    # The first line shows whether lines end with \r\n or \n; the object's bytes stay as they are.
    newline = b"\r\n" if body[body.find(separator) + len(separator) :].startswith(b"\r\n") else b"\n"
    _, head, rest = body.split(separator + newline, 2)
    fields = json.loads(head.split(newline * 2, 1)[1])
    headers, _, data = rest.partition(newline * 2)
    data_type = BytesParser(policy=HTTP).parsebytes(headers).get_content_type()
    return {"contentType": data_type, **fields}, data[: data.rindex(newline + separator)]


def _writable(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a client may set."""
    allowed = (
        *("cacheControl", "contentDisposition", "contentEncoding", "contentLanguage", "contentType", "metadata"),
        *("crc32c", "md5Hash"),
    )
    return {key: value for key, value in fields.items() if key in allowed and value is not None}


def _hashes(request: Request) -> dict[str, str]:
    """Return the checksums in a request's header, named as in an object's fields."""
    hashes = re.findall(r"(crc32c|md5)=([A-Za-z0-9+/]+={0,2})", request.headers.get("x-goog-hash", ""))
    return {{"md5": "md5Hash"}.get(kind, kind): value for kind, value in hashes}


async def _parse_fields(request: Request) -> dict[str, Any]:
    fields = await parse_json(request)
    return fields if isinstance(fields, dict) else {}


# Partial answers: https://cloud.google.com/storage/docs/json_api#fields-and-partial-responses.


def _with_fields(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint that answers only the requested fields, and with this server's address in links."""

    async def answer(request: Request) -> Response:
        fields = _parse_selection(request.query_params.get("fields", ""))
        response = await endpoint(request)
        if not isinstance(response, JSONResponse):
            return response
        here = f"http://{request.headers.get('host', '')}/"
        body = bytes(response.body).replace(b"https://www.googleapis.com/", here.encode())
        if fields:
            body = json.dumps(_select(json.loads(body), fields)).encode()
        return Response(body, response.status_code, media_type="application/json")

    return answer


def _parse_selection(selection: str) -> Fields:
    """Parse `a,b(c,d),e/f`. Raises Rejected."""
    fields: Fields = {}
    stack = [(fields, fields)]
    """For each open bracket: the object around it, and the last field in it."""
    for token in re.findall(r"[^,()/]+|[,()/]", selection.replace(" ", "")):
        around, last = stack[-1]
        if token == ",":
            stack[-1] = (around, around)
        elif token == "(":
            stack.append((last, last))
        elif token == ")" and len(stack) > 1:
            stack.pop()
        elif token not in ")/":
            stack[-1] = (around, last.setdefault(token, {}))
    if len(stack) > 1 or selection.count(")") > selection.count("("):
        raise Rejected(400, "invalidParameter", f"Invalid field selection {selection}")
    return fields


def _select(value: Any, fields: Fields) -> Any:
    if not fields or "*" in fields:
        return value
    if isinstance(value, list):
        return [_select(item, fields) for item in value]
    if isinstance(value, dict):
        return {name: _select(value[name], inner) for name, inner in fields.items() if name in value}
    return value
