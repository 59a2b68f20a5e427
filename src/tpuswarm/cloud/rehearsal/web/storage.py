"""Cloud Storage's JSON API: what google-cloud-storage and gcloud ask of it."""

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

from tpuswarm.cloud.rehearsal.common.call import Rejected
from tpuswarm.cloud.rehearsal.web.bucket_faults import BucketFaults, Endpoint
from tpuswarm.cloud.rehearsal.web.fields import with_fields
from tpuswarm.cloud.rehearsal.web.objects import Condition, Objects, Resource

PAGE = 1000
RANGE = re.compile(r"bytes=(\d*)-(\d*)")
CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


class Storage:
    """Answers for buckets and objects."""

    def __init__(self, objects: Objects, faults: BucketFaults | None = None):
        self._objects, self._faults = objects, faults
        self._finished: dict[str, Resource] = {}
        self._uploads: dict[str, tuple[str, str, Resource, Condition, bytearray]] = {}
        """Resumable ones by id: bucket, name, what is to be known of it, condition, bytes so far. A restart forgets
        them; clients begin anew, as they do after a week at Google.
        """

    def routes(self) -> list[Route]:
        """For an application."""
        return [Route(each.path, self._wrapped(each.endpoint), methods=each.methods) for each in self._routes()]

    def _wrapped(self, endpoint: Endpoint) -> Endpoint:
        found = with_fields(endpoint)
        return self._faults.around(found) if self._faults else found

    def _routes(self) -> list[Route]:
        return [
            Route("/storage/v1/b", self.buckets, methods=["GET", "POST"]),
            Route("/storage/v1/b/{bucket}", self.bucket, methods=["GET", "PATCH", "PUT", "DELETE"]),
            Route("/storage/v1/b/{bucket}/storageLayout", self.layout, methods=["GET"]),
            Route("/storage/v1/b/{bucket}/managedFolders", self.folders, methods=["GET"]),
            Route("/storage/v1/b/{bucket}/iam", self.policy, methods=["GET"]),
            Route("/storage/v1/b/{bucket}/iam/testPermissions", self.permissions, methods=["GET"]),
            Route("/storage/v1/b/{bucket}/o", self.objects, methods=["GET"]),
            Route(
                "/storage/v1/b/{bucket}/o/{rest:path}",
                self.object,
                methods=["GET", "HEAD", "PATCH", "PUT", "POST", "DELETE"],
            ),
            Route("/download/storage/v1/b/{bucket}/o/{rest:path}", self.object, methods=["GET", "HEAD"]),
            Route("/upload/storage/v1/b/{bucket}/o", self.upload, methods=["POST", "PUT", "DELETE"]),
            Route("/resumable/upload/storage/v1/b/{bucket}/o", self.upload, methods=["POST", "PUT", "DELETE"]),
        ]

    async def buckets(self, request: Request) -> Response:
        """buckets.list and buckets.insert."""
        query = request.query_params
        project = query.get("project", "")
        if request.method == "POST":
            return JSONResponse(self._objects.make_bucket(project, await _json(request)))
        found = self._objects.buckets(project, query.get("prefix", ""))
        return JSONResponse({"kind": "storage#buckets", "items": found})

    async def bucket(self, request: Request) -> Response:
        """buckets.get, patch, update and delete."""
        name = request.path_params["bucket"]
        found, condition = self._objects.bucket(name), Condition.of(dict(request.query_params))
        if request.method == "GET" and condition.is_unchanged(found):
            return Response(status_code=304)
        condition.check(found)
        if request.method == "DELETE":
            self._objects.delete_bucket(name)
            return Response(status_code=204)
        if request.method in ("PATCH", "PUT"):
            return JSONResponse(self._objects.change_bucket(name, await _json(request)))
        return JSONResponse(found)

    async def layout(self, request: Request) -> Response:
        """buckets.getStorageLayout."""
        found = self._objects.bucket(request.path_params["bucket"])
        return JSONResponse(
            {
                "kind": "storage#storageLayout",
                "bucket": found["name"],
                "location": found["location"],
                "locationType": found["locationType"],
            }
        )

    async def folders(self, request: Request) -> Response:
        """managedFolders.list: there are none."""
        self._objects.bucket(request.path_params["bucket"])
        return JSONResponse({"kind": "storage#managedFolders", "items": []})

    async def policy(self, request: Request) -> Response:
        """buckets.getIamPolicy: nobody but the owner."""
        name = self._objects.bucket(request.path_params["bucket"])["name"]
        return JSONResponse(
            {"kind": "storage#policy", "resourceId": f"projects/_/buckets/{name}", "version": 1, "bindings": []}
        )

    async def permissions(self, request: Request) -> Response:
        """buckets.testIamPermissions: the owner may do everything."""
        self._objects.bucket(request.path_params["bucket"])
        asked = request.query_params.getlist("permissions")
        return JSONResponse({"kind": "storage#testIamPermissionsResponse", "permissions": asked})

    async def objects(self, request: Request) -> Response:
        """objects.list."""
        query = dict(request.query_params)
        if not re.fullmatch(r"\d*", query.get("maxResults", "")):
            raise Rejected(400, "invalid", f"Invalid value for maxResults: '{query['maxResults']}'")
        after, size = query.get("pageToken", ""), min(int(query.get("maxResults") or 0) or PAGE, PAGE)
        items: list[Resource] = []
        folders: list[str] = []
        answer: Resource = {"kind": "storage#objects"}
        for each in self._objects.listing(request.path_params["bucket"], query):
            name = each if isinstance(each, str) else each["name"]
            if name <= after:
                continue
            if len(items) + len(folders) == size:
                answer["nextPageToken"] = max([*folders, *(item["name"] for item in items)])
                break
            if isinstance(each, str):
                folders.append(each)
            else:
                items.append(each)
        return JSONResponse({**answer, "items": items, "prefixes": folders})

    async def object(self, request: Request) -> Response:
        """objects.get, patch, update, delete, rewrite, copy, move and compose."""
        bucket, name, verb = _named(request)
        query = dict(request.query_params)
        condition = Condition.of(query)
        if verb:
            return await self._make_from_others(request, bucket, name, verb, query)
        if request.method == "DELETE":
            self._objects.find(bucket, name, query.get("generation"))
            self._objects.delete(bucket, name, condition)
            return Response(status_code=204)
        if request.method in ("PATCH", "PUT"):
            return JSONResponse(self._objects.change(bucket, name, await _json(request), condition))
        found = self._objects.find(bucket, name, query.get("generation"))
        if condition.is_unchanged(found):
            return Response(status_code=304)
        condition.check(found)
        if query.get("alt") != "media":
            return JSONResponse(found)
        return self._media(request, found)

    def _media(self, request: Request, found: Resource) -> Response:
        size = int(found["size"])
        headers = {
            "X-Goog-Hash": f"crc32c={found['crc32c']},md5={found['md5Hash']}",
            "X-Goog-Generation": found["generation"],
            "X-Goog-Metageneration": found["metageneration"],
            "X-Goog-Storage-Class": found["storageClass"],
            "X-Goog-Stored-Content-Length": str(size),
            "ETag": found["etag"],
            "Accept-Ranges": "bytes",
        }
        kind = found["contentType"]
        wanted = RANGE.fullmatch(request.headers.get("range", ""))
        if not wanted or wanted[0] == "bytes=-":
            return Response(self._objects.read(found), 200, headers, kind)
        first = int(wanted[1]) if wanted[1] else max(size - int(wanted[2]), 0)
        last = min(int(wanted[2]), size - 1) if wanted[1] and wanted[2] else size - 1
        if first >= size:
            raise Rejected(416, "requestedRangeNotSatisfiable", "The requested range cannot be satisfied.")
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return Response(self._objects.read(found, first, last - first + 1), 206, headers, kind)

    async def _make_from_others(
        self, request: Request, bucket: str, name: str, verb: str, query: dict[str, str]
    ) -> Response:
        body = await _json(request)
        if verb == "compose":
            if not 1 <= len(body.get("sourceObjects", ())) <= 32:
                raise Rejected(400, "invalid", "The number of source components must be between 1 and 32.")
            parts = [self._objects.find(bucket, each["name"], each.get("generation")) for each in body["sourceObjects"]]
            data = b"".join(self._objects.read(each) for each in parts)
            about = body.get("destination") or {}
            return JSONResponse(self._objects.write(bucket, name, data, about, Condition.of(query)))
        found = self._objects.find(bucket, name, query.get("sourceGeneration"))
        Condition.of(query, "ifSource").check(found)
        *to_bucket, to_name = (unquote(part) for part in re.split("/b/|/o/", verb)[1:])
        about = {key: found[key] for key in ("contentType", "metadata") if key in found} | body
        made = self._objects.write(
            (to_bucket or [bucket])[0], to_name, self._objects.read(found), about, Condition.of(query)
        )
        if verb.startswith("moveTo"):
            self._objects.delete(bucket, name, Condition(match=int(found["generation"])))
        if verb.startswith(("copyTo", "moveTo")):
            return JSONResponse(made)
        size = made["size"]
        answer = {"kind": "storage#rewriteResponse", "done": True, "objectSize": size, "totalBytesRewritten": size}
        return JSONResponse({**answer, "resource": made})

    # Uploads.

    async def upload(self, request: Request) -> Response:
        """objects.insert: simple, multipart or resumable."""
        query = dict(request.query_params)
        bucket, condition = request.path_params["bucket"], Condition.of(query)
        if "upload_id" in query:
            return await self._go_on(request, query["upload_id"])
        if query.get("uploadType") == "resumable":
            about = await _json(request)
            name = query.get("name") or about.pop("name", "")
            self._objects.check(bucket, name, condition)
            number = secrets.token_hex(16)
            self._uploads[number] = (bucket, name, _own(about), condition, bytearray())
            place = f"http://{request.headers['host']}{request.url.path}?uploadType=resumable&upload_id={number}"
            return Response(status_code=200, headers={"Location": place, "X-GUploader-UploadID": number})
        if query.get("uploadType") not in ("media", "multipart"):
            raise Rejected(400, "badRequest", f"Invalid upload type: '{query.get('uploadType', '')}'")
        data = await request.body()
        about = {"contentType": request.headers.get("content-type", "application/octet-stream")}
        if query.get("uploadType") == "multipart":
            about, data = _parts(request.headers.get("content-type", ""), data)
        name = query.get("name") or about.pop("name", "")
        return JSONResponse(self._objects.write(bucket, name, data, _own(about) | _hashes(request), condition))

    async def _go_on(self, request: Request, number: str) -> Response:
        if number in self._finished:
            return JSONResponse(self._finished[number])
        if number not in self._uploads:
            raise Rejected(404, "notFound", "No such upload; begin anew.")
        bucket, name, about, condition, data = self._uploads[number]
        if request.method == "DELETE":
            del self._uploads[number]
            return Response(status_code=499)
        where = CONTENT_RANGE.fullmatch(request.headers.get("content-range", ""))
        chunk = await request.body()
        if chunk and (not where or not where[1] or int(where[1]) <= len(data)):
            # Bytes that were sent before, and not acknowledged, come again.
            data[int(where[1]) if where and where[1] else 0 :] = chunk
        if where and (where[2] == "*" or int(where[2]) > len(data)):
            return Response(status_code=308, headers={"Range": f"bytes=0-{len(data) - 1}"} if data else {})
        made = self._objects.write(bucket, name, bytes(data), about | _hashes(request), condition)
        del self._uploads[number]
        self._finished[number] = made
        return JSONResponse(made)


def _named(request: Request) -> tuple[str, str, str]:
    """Bucket, object, and what is to be made of it. In the path as it was sent, an object's name is one part."""
    path = request.scope.get("raw_path", request.url.path.encode()).decode().split("?")[0]
    bucket, name = path.split("/b/", 1)[1].split("/o/", 1)
    name, _, verb = name.partition("/")
    if verb and not re.match(r"(rewriteTo|copyTo)/b/|moveTo/o/|compose$", verb):  # a client that does not quote
        name, verb = f"{name}/{verb}", ""
    return unquote(bucket), unquote(name), verb


def _parts(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """What is to be known of an object, and its bytes."""
    boundary = re.search(r"""boundary=['"]?([^'";]+)""", content_type)
    if not boundary:
        raise Rejected(400, "invalid", "Multipart must have a boundary.")
    separator = b"--" + boundary[1].encode()
    # Whether lines end with \r\n or \n is told by the first one; the data's own bytes are left alone.
    newline = b"\r\n" if body[body.find(separator) + len(separator) :].startswith(b"\r\n") else b"\n"
    _, head, rest = body.split(separator + newline, 2)
    about = json.loads(head.split(newline * 2, 1)[1])
    headers, _, data = rest.partition(newline * 2)
    kind = BytesParser(policy=HTTP).parsebytes(headers).get_content_type()
    return {"contentType": kind, **about}, data[: data.rindex(newline + separator)]


def _own(about: dict[str, Any]) -> dict[str, Any]:
    """What a client may say of an object."""
    allowed = (
        *("cacheControl", "contentDisposition", "contentEncoding", "contentLanguage", "contentType", "metadata"),
        *("crc32c", "md5Hash"),
    )
    return {key: value for key, value in about.items() if key in allowed and value is not None}


def _hashes(request: Request) -> dict[str, str]:
    """Checksums of a request's header, as in the metadata of an object."""
    found = re.findall(r"(crc32c|md5)=([A-Za-z0-9+/]+={0,2})", request.headers.get("x-goog-hash", ""))
    return {{"md5": "md5Hash"}.get(kind, kind): value for kind, value in found}


async def _json(request: Request) -> dict[str, Any]:
    body = await request.body()
    try:
        found = json.loads(body) if body else {}
    except ValueError as error:
        raise Rejected(400, "parseError", f"Parse Error: {error}") from error
    return found if isinstance(found, dict) else {}
