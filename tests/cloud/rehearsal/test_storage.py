"""Buckets: conditional writes by Google's clients and gcsfs, with every kind of upload."""

import pytest
from gcsfs.core import GCSFileSystem
from google.api_core import exceptions

from tests.cloud.rehearsal.conftest import storage_client

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
