"""Models fetched from a hub on loopback that works, is down or slow, or sends half a file."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.recipes.hub import COMMIT, serving
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.recipes.gpt2.pretrained import read_config
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language.hub import open_published
from tpuswarm.recipes.language.published_tokenizer import read_tokenizer

GOLDEN = Path(__file__).with_name("golden") / "model"
FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the golden model as openai-community/gpt2, an empty cache, and no pauses between retries."""
    shutil.copytree(GOLDEN, tmp_path / "hub" / "openai-community" / "gpt2")
    with serving(tmp_path / "hub") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield hub


def test_files_of_one_commit_are_fetched_once(hub):
    for name in ("gpt2", "117M", "hf:openai-community/gpt2"):
        place = open_published(name)
        for file in FILES:
            path = place.get(file, "model")
            assert path.read_bytes() == (GOLDEN / file).read_bytes() and path.parent.name == COMMIT
    fetched = [file for method, file, _ in hub.requests if method == "GET"]
    assert sorted(fetched) == sorted(FILES)
    assert place.find("no-such-file") is None
    assert GPT2(data="fake").shared_digest("gpt2") == COMMIT
    assert read_config(place).width == 16 and read_tokenizer(place).vocab <= 300


def test_offline_uses_the_cache_and_names_what_is_missing(hub, monkeypatch):
    place = open_published("gpt2")
    place.get("model.safetensors", "weights")
    requests = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = open_published("gpt2")
    assert again.commit == COMMIT and again.get("model.safetensors", "weights").exists()
    with pytest.raises(InputError, match=r"config.json of .*gpt2-medium at http.* is not in the cache"):
        open_published("gpt2-medium")
    words = r"tokenizer.json of openai-community/gpt2 at http.* is not in the cache .* HF_HUB_OFFLINE is set; unset it"
    with pytest.raises(InputError, match=words):  # it was not fetched, but may exist
        GPT2.options_at("gpt2")
    assert len(hub.requests) == requests


@pytest.mark.parametrize("how", ["offline", "down"])
def test_file_that_the_hub_does_not_have_is_remembered(hub, monkeypatch, how):
    (hub.root / "openai-community" / "gpt2" / "tokenizer.json").unlink()
    options = GPT2.options_at("gpt2")
    assert options == {"tokenizer": "gpt2", "vocab": 300}, "vocab.json and merges.txt are there"
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.is_down = True
    assert GPT2.options_at("gpt2") == options


def test_hub_that_is_down_fails_unless_the_files_are_cached(hub):
    hub.is_down = True
    words = r"config.json of openai-community/gpt2 at http.* could not be downloaded .*503.*HF_ENDPOINT"
    with pytest.raises(RunFailed, match=words):
        open_published("gpt2")
    hub.is_down = False
    open_published("gpt2").get("model.safetensors", "weights")
    hub.is_down = True
    assert open_published("gpt2").get("model.safetensors", "weights").exists()


def test_refused_connection_and_timeout_are_reported(hub, monkeypatch):
    for name in ("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", "huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT",
                 "huggingface_hub.file_download._ETAG_RETRY_TIMEOUT"):  # fmt: skip
        monkeypatch.setattr(name, 0.1)
    hub.delay_s = 0.3
    with pytest.raises(RunFailed, match=r"could not be downloaded \(.*timed out\)"):
        open_published("gpt2")
    hub.shutdown()
    hub.server_close()
    with pytest.raises(RunFailed, match=r"could not be downloaded \(.*refused\); try again"):
        open_published("gpt2")


CUT_OFF = """
import sys, time
time.sleep = lambda seconds: sys.exit("it tries again")
from tpuswarm.recipes.language.hub import open_published
print(open_published("gpt2").get("model.safetensors", "weights").name)
try:
    open_published("gpt2-medium")
except Exception as error:
    print(type(error).__name__, error)
"""


NO_NETWORK = ["unshare", "--map-root-user", "--net"]


@pytest.mark.parametrize(
    ("command", "env", "reason"),
    [
        (NO_NETWORK, {}, "huggingface.co: .*name resolution"),
        ([], {"HTTPS_PROXY": "http://127.0.0.1:9"}, "127.0.0.1: Connection refused"),
        ([], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "127.0.0.1: Connection refused"),
    ],
    ids=["no network", "no proxy", "no hub"],
)
def test_without_a_connection_the_cache_is_used_and_nothing_is_retried(hub, tmp_path, command, env, reason):
    open_published("gpt2").get("model.safetensors", "weights")
    names = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    env |= {name: value for name, value in os.environ.items() if name.upper() not in names}
    done = subprocess.run(
        [*command, sys.executable, "-c", CUT_OFF],
        env=env | {"HF_HUB_CACHE": str(tmp_path / "hub-cache")}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip(f"this machine does not allow network namespaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    cached, missing = done.stdout.splitlines()
    assert cached == "model.safetensors"
    assert re.match(
        r"RunFailed config.json of openai-community/gpt2-medium at \S+ could not be downloaded "
        rf"\(no connection to {reason}\); try again, set HF_ENDPOINT to another hub, or put the files into a folder",
        missing,
    ), missing


def test_network_that_answers_nothing_is_asked_once_for_all_files(hub, monkeypatch):
    open_published("gpt2").get("model.safetensors", "weights")
    is_over, asked = threading.Event(), []

    def hang(*args, **options):
        asked.append(args)
        is_over.wait(60)
        raise OSError("no name server answered")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        place = open_published("gpt2")
        assert [place.get(name, "").name for name in ("config.json", "model.safetensors")] and len(asked) == 1
    finally:
        is_over.set()


def test_address_that_never_answers_does_not_hide_one_that_does(hub, monkeypatch):
    """As on a computer whose IPv6 leads nowhere."""
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.2", hub.server_port), backlog=0))
        for _ in range(3):  # nothing accepts them, so the queue is full
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        addresses = [["127.0.0.2", "127.0.0.1"]]
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *args, **options: [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in (addresses.pop() if addresses else ["127.0.0.1"])  # the HTTP library's own wait is longer
        ])  # fmt: skip
        assert open_published("gpt2").commit == COMMIT and not addresses


def test_half_a_file_is_resumed(hub):
    place = open_published("gpt2")
    hub.cut_answers["model.safetensors"] = 2
    path = place.get("model.safetensors", "weights")
    assert path.read_bytes() == (GOLDEN / "model.safetensors").read_bytes()
    received = path.stat().st_size // 2 // 1024 * 1024  # in whole chunks
    ranges = [part for method, file, part in hub.requests if (method, file) == ("GET", "model.safetensors")]
    assert ranges == [None, f"bytes={received}-", f"bytes={received}-"]


def test_file_that_always_breaks_off_fails_and_leaves_nothing(hub, tmp_path):
    place = open_published("gpt2")
    hub.cut_answers["model.safetensors"] = 100
    words = r"model.safetensors of openai-community/gpt2 at http.* could not be downloaded \(.*closed"
    with pytest.raises(RunFailed, match=words):
        place.get("model.safetensors", "weights")
    assert not list((tmp_path / "hub-cache").rglob("*.incomplete"))
    hub.cut_answers.clear()
    before = len(hub.requests)
    assert place.get("model.safetensors", "weights").exists()
    assert [part for method, _, part in hub.requests[before:] if method == "GET"] == [None], "from its beginning"


def test_missing_model_is_reported(hub, tmp_path):
    with pytest.raises(InputError, match=r"no folder nobody/nothing, and there is no model nobody/nothing at http"):
        open_published("hf:nobody/nothing")
    (tmp_path / "hub" / "org" / "empty").mkdir(parents=True)
    with pytest.raises(InputError, match=r"hf:org/empty has no config.json"):
        open_published("hf:org/empty")
    with pytest.raises(InputError, match=r"is not a valid ORG/NAME"):
        open_published("hf:org/bad..name")


def test_full_disk_is_reported(on_small_disk, hub):
    weights = hub.root / "org" / "large" / "model.safetensors"
    shutil.copytree(GOLDEN, weights.parent)
    weights.write_bytes(bytes(6 * 2**20))
    printed = on_small_disk(f"""
import os, sys
os.environ |= {{"HF_ENDPOINT": {hub.url!r}, "HF_HUB_CACHE": sys.argv[1]}}
from tpuswarm.errors import RunFailed
from tpuswarm.recipes.language.hub import open_published
try:
    open_published("hf:org/large").get("model.safetensors", "weights")
except RunFailed as error:
    print(error)
""")
    assert "is full: make room for model.safetensors of org/large, or set HF_HOME" in printed[-1]
