"""Checks of a fleet's training before its machines are rented: batches, memory, data, and a run that has begun."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.fleet.conftest import job_lines
from tpuswarm.cli.plan.pools import read_pools
from tpuswarm.cli.train import batches, fleet_data, train_fleet
from tpuswarm.cli.train.batches import choose_batches
from tpuswarm.config.train_table import Train
from tpuswarm.errors import InputError
from tpuswarm.fleet import training
from tpuswarm.fleet.spec.file import read_swarm
from tpuswarm.plan.compile.request import CompileRequest, CompileResult
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.views.status import FINISHED, SwarmStatus, write_status

NOW = 10_000.0
TINY, URL = GPT2(size="tiny"), "gs://b/runs/all"
CONFIG, BEGUN = (
    "files/config.toml",
    b"""
[recipe]
name = "gpt2"
target = "tpuswarm.recipes.gpt2:GPT2"
options = {}

[train]
steps = 98
batch = 16
seed = 3
""",
)


@pytest.fixture
def objects(monkeypatch) -> dict[str, bytes]:
    """What every bucket holds, by name; at first nothing."""
    held: dict[str, bytes] = {}

    class Bucket:
        exists, read, read_if_there = held.__contains__, held.__getitem__, held.get

        def __init__(self, url: str):
            pass

        def create(self, name: str, data: bytes) -> None:
            held[name] = data

    for module in (train_fleet, batches):
        monkeypatch.setattr(module, "Bucket", Bucket)
    return held


def test_auto_batch_is_the_largest_per_pool_that_divides_the_others(capsys):
    assert choose_batches({"a": 416}, {"a": 8}) == {"a": 416}
    assert choose_batches({"a": 416, "b": 768}, {"a": 8, "b": 8}) == {"a": 384, "b": 768}
    assert "a 384 (fits 416), b 768 (fits 768)" in capsys.readouterr().out
    assert choose_batches({"a": 416, "b": 3_000}, {"a": 8, "b": 256}) == {"a": 352, "b": 2_816}
    with pytest.raises(InputError, match=r"no batches suit all pools: .*a 100 on 8 devices, b 200 on 256 devices"):
        choose_batches({"a": 100, "b": 200}, {"a": 8, "b": 256})


def test_auto_batch_is_computed_once_per_run(read, objects, tmp_path, monkeypatch):
    computed: list[object] = []
    monkeypatch.setattr(batches, "_choose", lambda file, train: computed.append(file) or {"small": 416, "slice": 832})
    read('batch = "auto"')
    path = tmp_path / "swarm.toml"

    def read_lines() -> list[str]:
        return list(job_lines(batches.resolve_batches(read_swarm(path), URL, TINY)).values())

    first = read_lines()
    assert "--batch 832 " in first[0] and first[1].endswith("--batch 416") and first[2].endswith("--batch 832")
    objects[CONFIG] = b""
    assert read_lines() == first and len(computed) == 1
    path.write_text(path.read_text().replace('name = "small"', 'name = "other"'))
    with pytest.raises(InputError, match="began with batches for the pools small, slice, and the file has other, sl"):
        read_lines()
    del objects["batches.json"]
    assert not any("--batch" in line for line in read_lines()), "a run that began with a number keeps it"


def test_training_again_does_not_restart_the_head_of_a_run_with_the_default_batch(read, objects):
    first = job_lines(batches.resolve_batches(read(), URL, TINY))
    objects[CONFIG] = BEGUN
    assert job_lines(batches.resolve_batches(read(), URL, TINY)) == first


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("batch = 32", "gs://b/runs/all is a different run: batch was 16, now 32; put it back"),
        ("batch = {small = 16, slice = 32}", "batch was 16, now 32"),
        ("seed = 4", "seed was 3, now 4"),
        ("batch = {small = 8, slice = 16}\nseed = 3", None),
    ],
)
def test_other_rows_for_a_run_that_has_begun_are_refused(read, objects, line, message):
    objects[CONFIG] = BEGUN
    with pytest.raises(InputError, match=message) if message else nullcontext():
        batches.resolve_batches(read(line), URL, TINY)


def test_damaged_configuration_in_the_bucket_is_named(read, objects):
    objects[CONFIG] = BEGUN.replace(b"16", b"many")
    with pytest.raises(InputError, match=rf"^{URL}/config.toml .*; restore a copy of it, or name another `run`"):
        batches.resolve_batches(read(), URL, TINY)


@pytest.mark.parametrize(
    ("phase", "length", "is_finished"),
    [
        (FINISHED, {}, True),
        (FINISHED, {"tokens": 100_000}, True),
        (FINISHED, {"tokens": 2_000_000}, False),
        (FINISHED, {"steps": 98}, True),
        (FINISHED, {"steps": 99}, False),
        ("open", {}, False),
    ],
)
def test_finished_run_needs_no_machines_unless_it_becomes_longer(tmp_path, objects, phase, length, is_finished):
    tokens = Tokens(100_352, 100_352, 0, 0, 0)
    write_status(tmp_path, SwarmStatus(
        NOW, NOW, 12, 1, phase, 100_352, tokens, 1.0, 0.0, 0, None, 2.5, 2.6, 12, (), (), "", {}
    ))  # fmt: skip
    objects |= {"files/status.json": (tmp_path / "status.json").read_bytes(), CONFIG: BEGUN}
    train = Train(recipe="gpt2-tiny", **length)
    found = train_fleet.describe_finished(URL, train)
    assert found.startswith(f"{URL} has finished: 100,352 of 100,352 tokens") == is_finished
    objects.clear()
    assert not train_fleet.describe_finished(URL, train), "it has not begun"


def test_each_pool_has_its_own_batch(read, tmp_path):
    head, small, slices = training.train_jobs(read("batch = {small = 16, slice = 64}"))
    assert "--batch 64 " in head.line and small.line.endswith("--batch 16") and slices.line.endswith("--batch 64")
    assert read_pools(tmp_path / "swarm.toml")[1].batches == {"v2-8": 16, "v5p-16": 64}
    assert small.says == "100 members, one on each v2-8 of pool small, batch 16"
    head, small, _ = training.train_jobs(read("batch = 64"))
    assert "--batch 64 " in head.line and "--batch" not in small.line


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("{small = 16}", "train.batch has no number for pool slice"),
        ("{small = 16, slice = 64, big = 8}", "train.batch names big, and the pools are small, slice"),
        ("{small = 24, slice = 64}", "batch of small is 24, which does not divide the largest, 64"),
        ("{small = 0, slice = 64}", "batch"),
    ],
)
def test_table_of_batches_that_does_not_fit_the_pools_is_refused(read, batch, message):
    with pytest.raises(InputError, match=message):
        training.train_jobs(read(f"batch = {batch}"))


def test_default_batch_suits_the_devices_of_all_pools_and_other_batches_are_refused(read):
    assert TINY.defaults["batch"] == 12
    head, small, _ = job_lines(batches.with_default_batch(read(), TINY)).values()  # v2-8 and v5p-16 have 8 devices each
    assert "--batch 16 " in head and "--batch" not in small
    for line, message in (
        (
            "batch = 12",
            "a batch of 12 rows does not divide evenly over the 8 devices of a machine of pool small: use 16",
        ),
        ("batch = {small = 12, slice = 24}", "12 rows does not divide evenly over the 8 devices .* pool small: use 16"),
        ("batch = 24\naccumulate = 2", "over the 8 devices x 2 micro-batches of a machine of pool small: use 32"),
    ):
        with pytest.raises(InputError, match=message):
            batches.check_batches(read(line))
    for line in ("batch = 24", "batch = {small = 8, slice = 16}", 'batch = "auto"', "batch = 32\naccumulate = 2"):
        batches.check_batches(read(line))


@pytest.mark.parametrize(
    ("result", "message"),
    [((True, ""), ""), ((False, "20 GiB"), "does not fit on a v2-8 with a batch of 16 rows: 20 GiB")],
)
@pytest.mark.usefixtures("objects")
def test_step_is_compiled_for_each_type_before_anything_is_rented(read, monkeypatch, result, message):
    requests: list[CompileRequest] = []

    class Compilers:
        def __init__(self, *_: object):
            pass

        def results(self, found):
            requests.extend(found)
            return [(request, CompileResult(result[0], problem=result[1])) for request in found]

    monkeypatch.setattr(batches, "CompilePool", Compilers)
    monkeypatch.setattr(batches, "no_compiler", str)
    file = read(provider='provider = "google"\nproject = "my-project-123"', before='[setup]\npip = ["tpuswarm"]')
    with pytest.raises(InputError, match=message) if message else nullcontext():
        batches.resolve_batches(file, URL, TINY)
    assert [(request.target.name, request.options.batch) for request in requests] == [("v2-8", 16), ("v5p-16", 16)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that machines get, but for what git ignores in it."""
    monkeypatch.chdir((tmp_path / "mine").mkdir() or tmp_path / "mine")
    Path(".gitignore").write_text("ignored\n")
    for name in ("in.txt", "ignored", "../out.txt", "texts/a.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("words")
    Path("link.txt").symlink_to("../out.txt")
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("data", "placed"),
    [
        ("fake", "fake"),
        ("gs://b/text", "gs://b/text"),
        ("in.txt", "in.txt"),
        ("texts", "texts"),
        ("{folder}/in.txt", "in.txt"),
        ("../out.txt", "gs://some/data/ID/out.txt"),
        ("ignored", "gs://some/data/ID/ignored"),
        ("link.txt", "gs://some/data/ID/out.txt"),
        ("..", "gs://some/data/ID/NAME"),
    ],
)
def test_data_that_machines_do_not_get_is_copied_to_the_bucket(read, folder, data, placed):
    train = read().train.model_copy(update={"data": data.format(folder=folder)})
    found, uploads = fleet_data.place_data(train, "gs://some/runs/all")
    name = re.sub(r"/data/[0-9a-f]{12}/", "/data/ID/", found)
    assert name == placed.replace("NAME", folder.parent.name)
    assert len(uploads) == (name != data and "gs://" in name), uploads


def test_other_local_files_that_machines_do_not_get_are_refused(read, folder):
    for line, name in (
        ('init_from = "ignored"', "init_from"),
        ('options = {tokenizer = "hf:../mine"}', "options.tokenizer"),
        ('options = {tokenizer = "hf:ignored"}', "options.tokenizer"),
    ):
        with pytest.raises(InputError, match=rf"^train.{name} is .*, which machines do not get"):
            fleet_data.place_data(read(line).train, "gs://some/runs/all")
        with pytest.raises(InputError, match=rf"^train.{name} is .*, which machines do not get"):
            fleet_data.place_data(read(line).train.model_copy(update={"data": "../out.txt"}), "gs://some/runs/all")
    with pytest.raises(InputError, match=r"^train.recipe is hf:.*, which machines do not get"):
        fleet_data.place_data(Train(recipe="hf:..", steps=1), "gs://some/runs/all")


def test_other_local_files_must_have_the_path_that_machines_have(read, folder):
    assert fleet_data.place_data(read('init_from = "./texts"').train, "gs://some/runs/all")[1] == ()
    with pytest.raises(InputError, match=r"^train.init_from is hf:/.* machines have elsewhere: write hf:./texts$"):
        fleet_data.place_data(read(f'init_from = "hf:{folder}/texts"').train, "gs://some/runs/all")
    assert fleet_data.place_data(Train(recipe="hf:texts", steps=1), "gs://some/runs/all")[1] == ()
    with pytest.raises(InputError, match=r"^train.recipe is hf:/.* machines have elsewhere: write hf:./texts$"):
        fleet_data.place_data(Train(recipe=f"hf:{folder}/texts", steps=1), "gs://some/runs/all")
