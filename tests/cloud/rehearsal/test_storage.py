"""Buckets: conditional writes by Google's clients and gcsfs, with every kind of upload."""

import pytest
import requests
from gcsfs.core import GCSFileSystem
from google.api_core import exceptions

from tests.cloud.rehearsal.conftest import storage_client
from tpuswarm.cloud.rehearsal.web.bucket_faults import BUCKET_FAULTS

NAME = "bucket-of-tests"
LARGE = bytes(range(256)) * (51 * 2**12)  # 51 MiB: gcsfs sends that in parts


@pytest.fixture(scope="module")
def client(endpoints):
    client = storage_client(endpoints)
    client.create_bucket(NAME, location="us-central1")
    return client


@pytest.fixture(scope="module")
def files(client, endpoints):
    return GCSFileSystem(
        project="p",
        token=endpoints.credentials(),
        endpoint_url=endpoints.http,
        use_listings_cache=False,
        skip_instance_cache=True,
    )


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


@pytest.mark.parametrize(("name", "data"), [("small", b"1"), ("large", LARGE)], ids=["multipart", "resumable"])
def test_gcsfs_create_fails_if_the_object_exists(files, name, data):
    files.pipe_file(f"{NAME}/{name}", data, mode="create")
    with pytest.raises(FileExistsError):
        files.pipe_file(f"{NAME}/{name}", b"other" + data, mode="create")
    assert files.cat_file(f"{NAME}/{name}") == data


def test_answers_to_raw_requests_are_googles(client, endpoints):
    """As the JSON API's reference and Google's storage-testbench have them."""

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
    assert len(ask("GET", objects, params={"maxResults": "0"}).json()["items"]) >= 1
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


def test_files_and_folders(files, tmp_path):
    files.pipe({f"{NAME}/tree/{name}": name.encode() for name in ("a", "b/c", "b/d", "e")})
    assert files.ls(f"{NAME}/tree", detail=False) == [f"{NAME}/tree/{name}" for name in ("a", "b", "e")]
    assert files.find(f"{NAME}/tree/b") == [f"{NAME}/tree/b/c", f"{NAME}/tree/b/d"]
    assert files.cat_file(f"{NAME}/tree/b/c", 1, 3) == b"/c" and files.cat_file(f"{NAME}/tree/a", -1) == b"a"
    files.mv(f"{NAME}/tree/a", f"{NAME}/tree/f")
    files.cp_file(f"{NAME}/tree/f", f"{NAME}/tree/g")
    assert not files.exists(f"{NAME}/tree/a") and files.cat_file(f"{NAME}/tree/g") == b"a"
    (tmp_path / "there").write_bytes(LARGE[: 9 * 2**20])
    files.put_file(str(tmp_path / "there"), f"{NAME}/tree/h")
    files.get_file(f"{NAME}/tree/h", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == LARGE[: 9 * 2**20]
    with files.open(f"{NAME}/tree/h", "rb") as file:
        file.seek(5_000_001)
        assert file.read(1000) == LARGE[5_000_001:5_001_001]
    files.rm(f"{NAME}/tree", recursive=True)
    assert files.find(f"{NAME}/tree") == []


def test_objects_are_listed_in_pages(client):
    for name in ("p/1", "p/2", "p/3/x", "p/4"):
        client.bucket(NAME).blob(name).upload_from_string(b"")
    pages = client.list_blobs(NAME, prefix="p/", delimiter="/", page_size=2).pages
    assert [([blob.name for blob in page], sorted(page.prefixes)) for page in pages] == [
        (["p/1", "p/2"], []),
        (["p/4"], ["p/3/"]),
    ]
