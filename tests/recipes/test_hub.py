"""Models fetched from a hub on loopback that is well, down, slow, or sends half of a file."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.recipes.hub import COMMIT, serving
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.recipes.gpt2.hub import RELEASED, open_published
from tpuswarm.recipes.gpt2.pretrained import read_config, read_tokenizer
from tpuswarm.recipes.gpt2.recipe import GPT2

GOLDEN = Path(__file__).with_name("golden") / "model"
FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that has the golden model as openai-community/gpt2, an empty cache, and no pauses."""
    shutil.copytree(GOLDEN, tmp_path / "hub" / "openai-community" / "gpt2")
    with serving(tmp_path / "hub") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield hub


def test_all_files_come_from_one_commit_once(hub):
    for name in ("gpt2", "117M", "hf:openai-community/gpt2"):
        place = open_published(name)
        for file in FILES:
            path = place.get(file, "model")
            assert path.read_bytes() == (GOLDEN / file).read_bytes() and path.parent.name == COMMIT
    fetched = [file for method, file, _ in hub.seen if method == "GET"]
    assert sorted(fetched) == sorted(FILES)
    assert place.find("no-such-file") is None
    assert GPT2(data="fake").shared_digest("gpt2") == COMMIT
    assert read_config(place).width == 16 and read_tokenizer(place).vocab <= 300


def test_every_released_name_is_one_of_four_models():
    assert {RELEASED[name] for name in ("gpt2", "117m", "124m")} == {"openai-community/gpt2"}
    assert RELEASED["345m"] == RELEASED["355m"] == RELEASED["gpt2-medium"] == "openai-community/gpt2-medium"
    assert RELEASED["774m"] == RELEASED["gpt2-large"] and RELEASED["1558m"] == RELEASED["gpt2-xl"]


def test_offline_takes_the_cache_and_says_what_is_not_in_it(hub, monkeypatch):
    place = open_published("gpt2")
    place.get("model.safetensors", "weights")
    asked = len(hub.seen)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = open_published("gpt2")
    assert again.commit == COMMIT and again.get("model.safetensors", "weights").exists()
    with pytest.raises(InputError, match=r"config.json of .*gpt2-medium at http.* is not in the cache"):
        open_published("gpt2-medium")
    words = r"tokenizer.json of openai-community/gpt2 at http.* is not in the cache .* HF_HUB_OFFLINE is set; unset it"
    with pytest.raises(InputError, match=words):  # it was not fetched, which does not mean that there is none
        GPT2.options_at("gpt2")
    assert len(hub.seen) == asked


@pytest.mark.parametrize("how", ["offline", "down"])
def test_what_the_hub_once_did_not_have_is_known_without_it(hub, monkeypatch, how):
    (hub.root / "openai-community" / "gpt2" / "tokenizer.json").unlink()
    options = GPT2.options_at("gpt2")
    assert options == {"tokenizer": "gpt2", "vocab": 300}, "vocab.json and merges.txt are there"
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.broken = True
    assert GPT2.options_at("gpt2") == options


def test_a_hub_that_is_down_is_a_failure_unless_the_files_are_here(hub):
    hub.broken = True
    with pytest.raises(
        RunFailed, match=r"config.json of openai-community/gpt2 at http.* could not be downloaded .*503.*HF_ENDPOINT"
    ):
        open_published("gpt2")
    hub.broken = False
    open_published("gpt2").get("model.safetensors", "weights")
    hub.broken = True
    assert open_published("gpt2").get("model.safetensors", "weights").exists()


def test_nothing_listens_there(hub):
    hub.shutdown()
    hub.server_close()
    with pytest.raises(RunFailed, match=r"could not be downloaded \(.*refused\); try again"):
        open_published("gpt2")


def test_a_slow_hub_is_given_up(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 0.2)
    hub.slow = 0.5
    with pytest.raises(RunFailed, match=r"could not be downloaded \(.*timed out\)"):
        open_published("gpt2")


def test_half_a_file_is_resumed(hub):
    place = open_published("gpt2")
    hub.cuts["model.safetensors"] = 2
    path = place.get("model.safetensors", "weights")
    assert path.read_bytes() == (GOLDEN / "model.safetensors").read_bytes()
    received = path.stat().st_size // 2 // 1024 * 1024  # in whole chunks
    ranges = [asked for method, file, asked in hub.seen if (method, file) == ("GET", "model.safetensors")]
    assert ranges == [None, f"bytes={received}-", f"bytes={received}-"]


def test_half_a_file_for_ever_is_said_and_leaves_nothing(hub, tmp_path):
    place = open_published("gpt2")
    hub.cuts["model.safetensors"] = 100
    with pytest.raises(
        RunFailed, match=r"model.safetensors of openai-community/gpt2 at http.* could not be downloaded \(.*closed"
    ):
        place.get("model.safetensors", "weights")
    assert not list((tmp_path / "hub-cache").rglob("*.incomplete"))
    hub.cuts.clear()
    tried = len(hub.seen)
    assert place.get("model.safetensors", "weights").exists()
    assert [asked for method, _, asked in hub.seen[tried:] if method == "GET"] == [None], "from its beginning"


def test_a_model_that_is_not_there(hub, tmp_path):
    with pytest.raises(InputError, match=r"there is no model nobody/nothing at http.*, or it is private"):
        open_published("hf:nobody/nothing")
    (tmp_path / "hub" / "org" / "empty").mkdir(parents=True)
    with pytest.raises(InputError, match=r"hf:org/empty has no config.json"):
        open_published("hf:org/empty")
    with pytest.raises(InputError, match=r"is not a valid ORG/NAME"):
        open_published("hf:org/--bad..name")


def test_a_full_disk_is_said(on_small_disk, hub):
    weights = hub.root / "org" / "large" / "model.safetensors"
    shutil.copytree(GOLDEN, weights.parent)
    weights.write_bytes(bytes(6 * 2**20))
    said = on_small_disk(f"""
import os, sys
os.environ |= {{"HF_ENDPOINT": {hub.url!r}, "HF_HUB_CACHE": sys.argv[1]}}
from tpuswarm.errors import RunFailed
from tpuswarm.recipes.gpt2.hub import open_published
try:
    open_published("hf:org/large").get("model.safetensors", "weights")
except RunFailed as error:
    print(error)
""")
    assert "is full: make room for model.safetensors of org/large, or set HF_HOME" in said[-1]
