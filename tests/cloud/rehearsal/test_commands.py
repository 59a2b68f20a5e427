"""The command `tpuswarm rehearsal`."""

import json

import pytest
from google.cloud import tpu_v2

from tests.local_cloud import local_cloud, slow_clock
from tests.waiting import until
from tpuswarm.fleet.spec.file import read_swarm
from tpuswarm.fleet.store.fleets import fleet_of_file

PARENT = "projects/commands/locations/us-south1-a"


@pytest.fixture
def rehearsal(typed, place, monkeypatch):
    monkeypatch.setenv("TPUSWARM_REHEARSAL", str(place.path))
    return lambda *words: typed("rehearsal", *words)


def test_start_status_and_weather(rehearsal, tpu, place):
    code, out, _ = rehearsal("start", "--speed", "300")
    assert code == 0 and "300 times as fast" in out and str(place.path) in out
    node = tpu_v2.Node(accelerator_type="v5litepod-8", runtime_version="v2-alpha-tpuv5-lite")
    tpu.create_node(parent=PARENT, node_id="shown", node=node)

    def state():
        machines = json.loads(rehearsal("status", "--json")[1])["machines"]
        return next((machine["state"] for machine in machines if machine["name"] == "shown"), None)

    until(lambda: state() == "READY")
    with slow_clock(place):
        assert rehearsal("maintenance", "show")[1].startswith("shown is") and state() == "REPAIRING"
    until(lambda: state() == "READY")
    assert rehearsal("break", "shown", "missing-device")[1] == "shown: the file of the last chip is not there\n"
    assert rehearsal("preempt", "shown", "--as", "gone")[0] == 0
    until(lambda: state() is None)

    assert rehearsal("stockout", "us-south1-a")[0] == rehearsal("quota", "us-south1-a/v5e=8")[0] == 0
    _, out, _ = rehearsal("status")
    assert "us-south1-a: stockout" in out and "us-south1-a: at most 8 of v5e" in out
    assert rehearsal("quota", "us-south1/IN_USE_ADDRESSES=8")[0] == 0
    assert "us-south1: at most 8 of IN_USE_ADDRESSES" in rehearsal("status")[1]
    assert rehearsal("quota", "us-south1/IN_USE_ADDRESSES=none")[0] == 0
    assert rehearsal("stockout", "us-south1-a", "--over")[0] == rehearsal("quota", "us-south1-a/v5e=none")[0] == 0
    assert "us-south1-a" not in rehearsal("status")[1]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("start --speed 0", "--speed must be above 0 and at most 100,000, not 0"),
        ("preempt no-such", "the local cloud has no machine 'no-such'"),
        ("stockout us-south1-x", "there is no zone 'us-south1-x'; did you mean us-south1-"),
        ("stockout nowhere", "there is no zone 'nowhere'; zones look like us-central1-f\n"),
        ("quota us-south1-a", "a quota is ZONE=N, such as us-central1-f=16, or ZONE=none, not us-south1-a"),
        ("quota us-soth1/INSTANCES=1", "there is no region 'us-soth1'; did you mean us-south1?"),
        ("quota us-south1-a/v55=1", "there is no generation 'v55' of TPUs; did you mean v5"),
        ("break us-south1-a hiden", "there is no fault 'hiden'; did you mean hidden?"),
        ("break no-such lock", "the local cloud has no machine 'no-such'"),
    ],
)
def test_wrong_input_is_one_sentence(rehearsal, line, sentence):
    code, out, err = rehearsal(*line.split())
    assert (code, out) == (2, "") and err.startswith(f"error: {sentence}")


def test_only_start_starts_a_cloud(typed, tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_REHEARSAL", str(tmp_path))
    nothing = f"no local cloud runs in {tmp_path}. Start it: `tpuswarm rehearsal start`\n"
    assert typed("rehearsal", "status")[:2] == (0, nothing)
    assert json.loads(typed("rehearsal", "status", "--json")[1]) == {"running": False, "folder": str(tmp_path)}
    assert typed("rehearsal", "preempt", "x")[0] == 2 and typed("rehearsal", "status", "--env")[0] == 2
    assert typed("rehearsal", "stop")[1] == f"no local cloud runs in {tmp_path}\n"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "swarm.toml").write_text(
        'name = "a"\nprovider = "rehearsal"\n[storage]\nbucket = "my-bucket"\n[train]\nrecipe = "gpt2-tiny"\n'
        '[[pool]]\nname = "p"\ntype = "v2-8"\nzones = ["us-central1-f"]\n'
    )
    made = fleet_of_file(read_swarm(tmp_path / "swarm.toml")).folder / "fleet.json"
    made.parent.mkdir(parents=True)
    made.touch()
    assert typed("status")[0] == 0
    for words in (("list",), ("cost",), ("describe", "p-0", "--fleet", "swarm.toml")):
        code, _, err = typed(*words)
        assert code == 2 and f"no local cloud runs in {tmp_path}" in err, err
    assert typed("rehearsal", "status")[1] == nothing
    with local_cloud(tmp_path):
        assert typed("rehearsal", "stop")[0] == 0
        assert not list((tmp_path / "machines").iterdir())
