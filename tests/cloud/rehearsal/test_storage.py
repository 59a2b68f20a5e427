"""Buckets: conditional writes by Google's client, and its raw answers."""

import os
import re

import pytest
import requests
from google.api_core import exceptions

from tests.cloud.rehearsal.conftest import storage_client
from tpuswarm.cloud.rehearsal.storage.bucket_faults import BUCKET_FAULTS

NAME = "bucket-of-tests"


@pytest.fixture(scope="module")
def client(endpoints):
    client = storage_client(endpoints)
    client.create_bucket(NAME, location="us-central1")
    return client


def test_bucket_has_a_location_labels_and_one_owner(client):
    assert client.get_bucket(NAME).location == "US-CENTRAL1" and NAME in [found.name for found in client.list_buckets()]
    with pytest.raises(exceptions.Conflict):
        client.create_bucket(NAME)
    with pytest.raises(exceptions.NotFound):
        client.get_bucket("no-such-bucket")
    bucket = client.get_bucket(NAME)
    bucket.labels = {"a": "b"}
    bucket.patch()
    assert client.get_bucket(NAME).labels == {"a": "b"}
    with pytest.raises(exceptions.Conflict):
        client.bucket(NAME).blob("x").upload_from_string(b"")
        client.get_bucket(NAME).delete()


def test_answers_to_raw_requests_are_googles(client, endpoints):
    """Compare with the JSON API's reference and Google's storage-testbench."""

    def ask(method, path, **given):
        headers = {"Authorization": f"Bearer {endpoints.token}", **given.pop("headers", {})}
        return requests.request(method, f"{endpoints.http}/{path}", headers=headers, timeout=60, **given)

    objects, upload = f"storage/v1/b/{NAME}/o", f"upload/storage/v1/b/{NAME}/o"
    ask("POST", f"{upload}?uploadType=media&name=raw", data=b"raw")
    made = ask("GET", f"{objects}/raw").json()
    same = {"ifGenerationNotMatch": made["generation"]}
    assert ask("GET", f"{objects}/raw", params=same).status_code == 304
    assert ask("GET", f"{objects}/raw", params={"ifMetagenerationNotMatch": "1"}).status_code == 304
    assert ask("GET", f"{objects}/raw", params={"ifGenerationMatch": "x"}).status_code == 400
    changes = {"name": "other", "size": "9", "generation": "1", "metadata": {"a": "b"}}
    changed = ask("PATCH", f"{objects}/raw", json=changes).json()
    assert {name for name in made if changed[name] != made[name]} == {"metageneration", "updated"} - (
        {"updated"} if changed["updated"] == made["updated"] else set()
    )
    assert changed["metadata"] == {"a": "b"} and changed["metageneration"] == "2"
    assert ask("PATCH", f"{objects}/raw", json={"metadata": {"a": None}}).json()["metadata"] == {}
    assert len(ask("GET", objects, params={"maxResults": "0"}).json()["items"]) >= 1
    assert ask("GET", objects, params={"maxResults": "x"}).status_code == 400
    for name in ("g/1.txt", "g/2.json", "g/h/3.txt"):
        ask("POST", upload, params={"uploadType": "media", "name": name}, data=b"x")
    for glob, found in (("g/*", "12"), ("g/**.txt", "13"), ("g/{2,3}*", "2"), ("**/[!1].txt", "3")):
        listed = ask("GET", objects, params={"matchGlob": glob, "fields": "items(name,size),nextPageToken"}).json()
        assert [(item.pop("name"), item) for item in listed.pop("items")] == [
            (name, {"size": "1"}) for name in ("g/1.txt", "g/2.json", "g/h/3.txt") if re.search(f"[{found}][.]", name)
        ]
        assert listed == {}
    assert ask("GET", f"{objects}/raw", params={"fields": "name,x(y"}).status_code == 400
    assert ask("GET", f"{objects}/raw").json()["mediaLink"].startswith(endpoints.http)
    bucket = f"storage/v1/b/{NAME}"
    version = ask("GET", bucket).json()["metageneration"]
    for method, code in (("GET", 304), ("PATCH", 412)):
        assert ask(method, bucket, params={"ifMetagenerationNotMatch": version}, json={}).status_code == code
    for method in ("GET", "PATCH", "DELETE"):
        assert ask(method, bucket, params={"ifMetagenerationMatch": "99"}, json={}).status_code == 412
    wrong = {"X-Goog-Hash": "crc32c=AAAAAA=="}
    assert ask("POST", f"{upload}?uploadType=media&name=x", data=b"x", headers=wrong).status_code == 400
    for wrong in ("uploadType=other&name=x", "name=x", "uploadType=media", "uploadType=media&name=.."):
        assert ask("POST", f"{upload}?{wrong}", data=b"x").status_code == 400, wrong
    session = ask("POST", f"{upload}?uploadType=resumable&name=r", json={}).headers["Location"]
    path = session.removeprefix(f"{endpoints.http}/")
    for _ in range(2):  # the second time it is finished already
        answer = ask("PUT", path, data=b"abc", headers={"Content-Range": "bytes 0-2/3"})
        assert answer.status_code == 200 and answer.json()["size"] == "3"
    with pytest.raises(exceptions.BadRequest, match="crc32c"):
        blob = client.bucket(NAME).blob("damaged")
        blob.crc32c = "AAAAAA=="
        blob.upload_from_string(b"not that", checksum=None)
    sources = {"sourceObjects": [{"name": "raw"}] * 33}
    assert ask("POST", f"{objects}/all/compose", json=sources).status_code == 400
    for name in ("Upper", "goog-x", "1.2.3.4", "-x-", "ab"):
        assert ask("POST", "storage/v1/b", params={"project": "p"}, json={"name": name}).status_code == 400, name
    ask("PATCH", f"storage/v1/b/{NAME}", json={"labels": {"a": "b", "x": "1", "y": "2"}})
    assert ask("PATCH", f"storage/v1/b/{NAME}", json={"labels": {"x": None}}).json()["labels"] == {"a": "b", "y": "2"}


@pytest.mark.parametrize("fault", BUCKET_FAULTS)
def test_fault_of_a_bucket_is_planted_and_removed(client, endpoints, fault):
    name = f"broken-{fault}"
    client.create_bucket(name)
    bucket = client.bucket(name)
    bucket.blob("large").upload_from_string(b"there", timeout=60)

    def plant(mend):
        requests.post(
            f"{endpoints.http}/rehearsal/break", json={"name": name, "fault": fault, "mend": mend},
            headers={"Authorization": f"Bearer {endpoints.token}"}, timeout=60,
        ).raise_for_status()  # fmt: skip

    def has_trouble():
        """Upload, download and replace an object until something goes wrong, a hundred times at most."""
        once = {"timeout": 2.0, "retry": None}
        for _ in range(100):
            blob = bucket.blob("large")
            try:
                blob.upload_from_string(bytes(100), **once)
                session = bucket.blob("chunks").create_resumable_upload_session(size=3, **once)
                client._http.put(session, data=b"abc", timeout=2.0).raise_for_status()
                found = bucket.blob("large").download_as_bytes(**once)
                assert bucket.blob("chunks").download_as_bytes(**once) == b"abc"
                bucket.blob("chunks").delete(**once)
                bucket.blob("large").upload_from_string(found[:9], if_generation_match=blob.generation, **once)
            except Exception:  # noqa: BLE001  # each fault has its own
                return True
        return False

    plant(mend=False)
    assert has_trouble()
    plant(mend=True)
    bucket.blob("large").upload_from_string(b"well", timeout=60)
    assert bucket.blob("large").download_as_bytes(timeout=60) == b"well"


def test_fault_of_a_bucket_that_is_not_there_is_refused(client, endpoints):
    answer = requests.post(
        f"{endpoints.http}/rehearsal/break", json={"name": f"{NAME}s", "fault": "outage"},
        headers={"Authorization": f"Bearer {endpoints.token}"}, timeout=60,
    )  # fmt: skip
    assert answer.status_code == 400 and f"no bucket '{NAME}s'; did you mean {NAME}" in answer.text


def test_upload_is_refused_if_another_finished_first(client):
    session = client.bucket(NAME).blob("late").create_resumable_upload_session(size=3, if_generation_match=0)
    client.bucket(NAME).blob("late").upload_from_string(b"first")
    answer = client._http.put(session, data=b"abc", headers={"Content-Range": "bytes 0-2/3"})
    assert answer.status_code == 412 and client.bucket(NAME).blob("late").download_as_bytes() == b"first"


def test_generation_is_replaced_once(client):
    blob = client.bucket(NAME).blob("y z/ü")
    blob.upload_from_string(b"one\r\n--two", if_generation_match=0)
    first = blob.generation
    blob.upload_from_string(b"two", if_generation_match=first)
    with pytest.raises(exceptions.PreconditionFailed):
        client.bucket(NAME).blob("y z/ü").upload_from_string(b"three", if_generation_match=first)
    with pytest.raises(exceptions.PreconditionFailed):
        client.bucket(NAME).blob("y z/ü").delete(if_generation_match=first)
    assert client.bucket(NAME).blob("y z/ü").download_as_bytes() == b"two"


def test_objects_are_copied_read_in_parts_and_deleted_together(client):
    bucket, large = client.bucket(NAME), os.urandom(2**20 + 1)
    source = bucket.blob("tree/a")
    source.chunk_size = 2**18
    source.upload_from_string(large)
    copies = [bucket.copy_blob(source, bucket, "tree/copy"), bucket.blob("tree/rewritten")]
    copies[1].rewrite(source)
    for blob in copies:
        assert blob.download_as_bytes(start=5, end=9) == large[5:10] and blob.download_as_bytes() == large
    with client.batch():
        for blob in (source, *copies):
            blob.delete()
    assert not list(client.list_blobs(NAME, prefix="tree/"))


def test_objects_are_listed_in_pages(client):
    for name in ("p/1", "p/2", "p/3/x", "p/4"):
        client.bucket(NAME).blob(name).upload_from_string(b"")
    pages = client.list_blobs(NAME, prefix="p/", delimiter="/", page_size=2).pages
    assert [([blob.name for blob in page], sorted(page.prefixes)) for page in pages] == [
        (["p/1", "p/2"], []),
        (["p/4"], ["p/3/"]),
    ]
