"""The commands on a model of a cloud: previews as golden text, a life from up to down, and what interrupts it."""

import io
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.fleet.here import SWARM, TRC
from tpuswarm.cli.fleet import _drawn, look_at
from tpuswarm.cli.jobs import carry
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Worker
from tpuswarm.errors import RunFailed
from tpuswarm.fleet.core.jobs import Job, Seat
from tpuswarm.fleet.core.memory import Work
from tpuswarm.fleet.keeping.document import path_of
from tpuswarm.fleet.keeping.fleets import Fleet, find
from tpuswarm.fleet.setting_up import KeptSetup
from tpuswarm.remote.setup.table import Setup

GOLDEN = Path(__file__).parent / "golden"
TRAINED = f"""allow_cross_region = true
{SWARM}
[storage]
bucket = "my-bucket"
region = "us-central1"

[setup]
pip = ["tpuswarm[gcloud,tpu]"]

[train]
recipe = "gpt2-tiny"
data = "fake"
steps = 100
cycle = 8
"""
PREVIEWS = {
    "up-trc": (TRC, ["up", "--dry-run"]),
    "up-scale": (TRC, ["up", "--dry-run", "--scale", "small=120", "--scale", "five=0", "--paid"]),
    "up-not-paid": (TRC, ["up", "--dry-run", "--scale", "five=6"]),
    "up-swarm": (SWARM, ["up", "--dry-run"]),
    "up-one": (None, ["up", "--dry-run", "--type", "v3-8", "--zone", "europe-west4-a", "--name", "node-1"]),
    "train-swarm": (TRAINED, ["train", "swarm.toml", "--dry-run"]),
}


def golden(name: str, words: list[str], said: str) -> None:
    text = f"$ {shlex.join(['tpuswarm', *words])}\n{said}"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("TPUSWARM_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", PREVIEWS)
def test_a_preview_is_this_text(name, here):
    file, words = PREVIEWS[name]
    if file:
        (here.folder / "swarm.toml").write_text(file)
    golden(name, words, here.run(shlex.join(words)))
    assert here.cloud.calls == [] and not (here.folder / "state").exists()


def test_a_dry_run_imports_nothing_of_google_or_jax(tmp_path):
    (tmp_path / "swarm.toml").write_text(TRC)
    code = (
        "import sys; sys.argv = ['tpuswarm', 'up', '--dry-run']\n"
        "from tpuswarm.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'jax', 'ray', 'grpc', 'google.cloud', 'google.auth', 'asyncssh'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_life(here):
    said = here.run("up --yes")
    assert here.ready() == ["gpt2-head", "gpt2-router", "v2-usc1f-0", "v2-usc1f-1", "v3-euw4a-0", "v5e-usw4a-0"]
    assert "nobody keeps it from now on" in said and "v3-euw4a-0: ready: it is ready" in said
    assert "there is nothing to do" in here.run("up --yes")

    here.cloud.preempt(("us-central1-f", "v2-usc1f-1"))
    said = here.run("up --yes")
    assert "1. delete v2-8 in us-central1-f: v2-usc1f-1; the cloud took it away (PREEMPTED)" in said
    assert "2. create v2-8 (spot) in us-central1-f: v2-usc1f-1; $1.35 an hour" in said, "what it costs is shown first"
    assert "together: 6 machines" in said
    assert len(here.ready()) == 6
    shown = json.loads(here.run("list --json"))
    lost = {each["name"]: each["preemptions"] for each in shown["machines"]}
    assert lost["v2-usc1f-1"] == 1 and lost["v2-usc1f-0"] == 0
    assert max(map(len, here.run("list").splitlines()[:7])) <= 80  # the table
    assert "the cloud took it away after" in here.run("describe v2-usc1f-1")
    assert json.loads(here.run("cost --json"))["pools"]["small"]["hourly"]["dollars"] == pytest.approx(2.7)

    assert "v5e-usw4a-0 is a pod of 4 hosts" in here.run("pause v5e", code=2)
    assert "v2-usc1f-0 is spot, and could not be started again" in here.run("pause v2-usc1f-0", code=2)
    here.run("pause v3 --yes")
    assert here.cloud.there["europe-west4-a", "v3-euw4a-0"].state == "stopped"
    here.run("resume v3 --yes")
    assert len(here.ready()) == 6

    here.run("down v2-usc1f-0 --yes")
    assert "v2-usc1f-0" not in here.ready() and len(here.cloud.there) == 5
    here.run("up --yes --scale small=0")
    assert len(here.cloud.there) == 4
    here.cloud.foreign("theirs", "us-central1-f")
    golden("down", ["down", "--dry-run"], here.run("down --dry-run"))
    said = here.run("down --yes")
    assert list(here.cloud.there) == [("us-central1-f", "theirs")]
    assert "nothing that carries the id gpt2-abc234 is left in project model, as its lists show" in said
    assert "`tpuswarm up` brings it back" in said
    assert "it is down: requested by `tpuswarm down`; it has cost $" in here.run("list")
    assert "keep" not in here.run("list")
    again = here.run("down --yes")
    assert again.startswith("gpt2-abc234 is down already: requested by `tpuswarm down`")
    assert "nothing that carries the id gpt2-abc234 is left" in again
    here.run("up --yes")
    assert len(here.ready()) == 7


def test_money_goes_on_while_nobody_keeps_it(here, monkeypatch):
    here.run("up --yes")
    monkeypatch.setattr("time.time", lambda: here.cloud.now)
    before = json.loads(here.run("cost --json"))
    here.cloud.advance(3600)
    here.cloud.preempt(("us-central1-f", "v2-usc1f-1"))
    after = json.loads(here.run("cost --json"))
    assert after["pools"]["small"]["hours"] - before["pools"]["small"]["hours"] == pytest.approx(2, abs=0.1)
    assert json.loads(here.run("list --json"))["dollars"] == pytest.approx(after["dollars"], abs=0.1)
    assert "no keeper runs, so nothing lost is replaced" in here.run("list")


def test_one_tpu_without_a_file(here, monkeypatch):
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "my-project")
    (here.folder / "swarm.toml").unlink()
    here.run("up --type v3-8 --zone europe-west4-a --name node-1 --yes")
    assert here.ready() == ["node-1"]
    assert "node-1: v3-8 (on-demand)" in here.run("describe node-1")
    here.run("down node-1 --yes")
    assert here.cloud.there == {}


def test_ctrl_c_says_what_exists_and_the_same_command_goes_on(here, monkeypatch):
    slept = []

    def interrupted(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 2:
            raise KeyboardInterrupt
        here.cloud.advance(20)

    monkeypatch.setattr("time.sleep", interrupted)
    said = here.run("up --yes", code=130)
    assert "nobody keeps the fleet now" in said
    assert "6 machines are there: gpt2-head (staging), gpt2-router (staging)" in said
    assert "the same command goes on from here" in said
    slept.clear()
    monkeypatch.setattr("time.sleep", lambda seconds: here.cloud.advance(20))
    here.run("up --yes")
    assert len(here.ready()) == 6
    monkeypatch.setattr("time.sleep", interrupted)
    slept += [0, 0]
    assert "6 machines are there" in here.run("down --yes", code=130)
    monkeypatch.setattr("time.sleep", lambda seconds: here.cloud.advance(20))
    here.run("down --yes")
    assert here.cloud.there == {}


def test_a_damaged_document_is_made_again_from_the_file_and_labels(here):
    here.run("up --yes")
    path = here.folder / "state/tpuswarm/documents/my-project" / path_of("gpt2")
    path.write_bytes(b"7\n{broken")
    assert "is damaged (7 bytes)" in here.run("list", code=1)
    assert "is damaged (7 bytes)" in here.run("up --yes")
    assert len(here.cloud.there) == len(here.ready()) == 6
    path.unlink()
    assert "is lost: it is made again" in here.run("up --yes")
    assert len(here.cloud.there) == 6
    here.run("down --yes")
    assert here.cloud.there == {}


def test_nobody_waits_for_a_job_of_a_fleet_that_comes_down(here):
    here.run("up --yes")
    fleet = Fleet("gpt2", "google", "my-project", None)
    job = Job("main", "small", "true", "preempted", (Seat("small"),))

    def ends(found):
        return replace(found, jobs=(job,), desired=replace(found.desired, down="its money is spent"))

    fleet.store(here.cloud).change(ends)
    with pytest.raises(RunFailed, match="gpt2 comes down"):
        carry(fleet, "main", lambda job: job.over)


def test_a_fleet_that_has_ended_by_itself_comes_up_again_and_its_jobs_do_not(here):
    (here.folder / "swarm.toml").write_text(SWARM.replace('"idle 30m"', '"done"'))
    here.run("up --yes")
    store = Fleet("gpt2", "google", "my-project", None).store(here.cloud)
    job = Job("main", "small", "true", "preempted", (Seat("small", "v2-usc1f-0", 1, "running"),))
    ended = "the work is done"
    store.change(
        lambda found: replace(
            found, jobs=(job,), work=Work(done=True), desired=replace(found.desired, down=ended, revision=2)
        )
    )
    here.run("keep")  # to the end
    assert here.cloud.there == {}
    here.run("up --yes")
    assert len(here.ready()) == 6
    document = store.load()
    assert document.work == Work() and document.desired.down is None and document.jobs[0].over


def test_machines_of_a_lost_fleet_are_shown_and_deleted_when_asked(here):
    here.run("up --yes")
    labels = {"tpuswarm-fleet": "gpt3-zzzzzz", "tpuswarm-pool": "small"}
    here.cloud.foreign("v2-usc1f-9", "us-central1-f", labels=labels)
    assert "not of this fleet: 1 of fleet gpt3-zzzzzz: v2-usc1f-9" in here.run("list")
    said = here.run("logs v2-usc1f-9", code=2)
    assert said.startswith("error: v2-usc1f-9 is of another fleet, gpt3-zzzzzz: give the command beside the swarm.toml")
    assert "`tpuswarm down --orphans gpt3-zzzzzz` deletes its machines" in " ".join(said.split())
    assert "no machine carries the id nobody" in here.run("down --orphans nobody", code=2)
    here.run("down --orphans gpt3-zzzzzz --yes")
    assert len(here.cloud.there) == len(here.ready()) == 6


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("up", "nobody can be asked here: give --yes"),
        ("up --scale smal=3", "there is no pool 'smal'; did you mean small?"),
        ("up --scale small=many", "--scale takes POOL=N with N from 0 to 1,000, such as small=20, not 'small=many'"),
        ("up --spot", "--zone, --name, --spot and --down-when go with --type"),
        ("up swarm.toml --type v2-8", "give a file or --type, not both"),
        ("up --type v2-8 --zone us-west1-a", "no list has a v2-8 in us-west1-a; zones that have it: asia-east1-c"),
        ("up none.toml", "there is no file none.toml"),
        ("down nobody", "there is no machine 'nobody'"),
        ("list", "there is no fleet gpt2 in project model: `tpuswarm up` makes it"),
        ("resume v2-usc1f-0", "there is no fleet gpt2 in project model"),
    ],
)
def test_what_is_asked_wrongly(here, line, said):
    if line == "down nobody":
        here.run("up --yes")
        here.cloud.calls.clear()
    assert said in here.run(line, code=2)
    assert not [each for each in here.cloud.calls if each.startswith(("create", "delete"))]


def test_a_pool_does_not_become_another_unseen(here):
    here.run("up --yes")
    (here.folder / "swarm.toml").write_text(SWARM.replace('type = "v2-8"', 'type = "v3-8"'))
    assert "pool small is of v2-8 (spot) and would become v3-8 (spot)" in here.run("up --yes", code=2)
    assert not here.cloud.deleted


def test_what_cannot_be_had_is_a_failure_with_its_reason(here):
    (here.folder / "swarm.toml").write_text(TRC)
    said = here.run("up --yes --scale five=6 --scale small=1", code=1)
    assert "not all of it can be had: 1 of pool five: europe-west4-a: no grant covers a further v3-8" in said
    assert len(here.ready()) == 6


def test_a_router_leads_to_every_tpu_of_a_fleet(here):
    here.run("up --yes")
    said = here.run("router show --from swarm.toml")
    assert "# port 22000: v2-usc1f-0/0" in said and "# port 22001: v2-usc1f-1/0" in said
    assert "gpt2-head" not in said
    first = next(each for each in here.cloud.there.values() if each.name == "v2-usc1f-0")
    assert f"22000 : {first.workers[0].internal} . 22" in said
    assert "give one of ROUTER.toml and --from" in here.run("router show", 2)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_a_live_list_fits_its_screen_and_leaves_out_what_is_well(here, width, height):
    (here.folder / "swarm.toml").write_text(TRC)
    here.run("up --yes --scale small=60")
    here.cloud.preempt(("us-central1-f", "v2-usc1f-57"))
    _, read = look_at(None)
    screen = Console(width=width, height=height, file=io.StringIO())
    screen.print(_drawn(*read(), screen.width, screen))
    lines = screen.file.getvalue().splitlines()
    assert len(lines) == height - 1 and max(map(len, lines)) <= width, lines
    assert lines[1].startswith("v2-usc1f-57  v2-8") and "preempted" in lines[1]
    assert any(line.startswith("and ") and line.rstrip().endswith("more") for line in lines)
    assert sum(line.startswith("grant of ") for line in lines) == 2


def test_doctor_says_what_costs_and_is_of_no_use(here):
    here.run("up --yes")
    zone = "us-central1-f"
    here.cloud.change((zone, "v2-usc1f-0"), healthy=False, why="HBM_ECC")
    labels = {FLEET_LABEL: "gpt2-abc234", POOL_LABEL: "former"}
    here.cloud.foreign("left", zone, labels=labels, workers=(Worker("10.0.0.9", None),))
    said = " ".join(here.run("logs left", code=2).split())
    assert "left is of no pool of the fleet any more: `tpuswarm list` shows it" in said and "no run" not in said
    long_ago, here.cloud.capacity["us-west4-a"] = here.cloud.now - 3 * 86400, 0
    here.cloud.change(("us-west4-a", "v5e-usw4a-0"), state="waiting", created=long_ago)
    found = {each["check"]: each for each in json.loads(here.run("doctor cloud --json", 1))["found"]}
    assert {name: each["of"] for name, each in found.items()} == {
        "keeper": "gpt2", "health": "v2-usc1f-0", "orphan": "left", "waits": "v5e-usw4a-0",
    }  # fmt: skip
    assert "HBM_ECC" in found["health"]["what"] and "no pool former is wanted" in found["orphan"]["what"]
    assert found["orphan"]["what"].startswith("a v2-8 in us-central1-f that costs $4.50 an hour")
    assert found["orphan"]["mend"] == "`tpuswarm down left`"


def test_whatever_goes_wrong_in_up_keep_somebody_keeps_it(here, monkeypatch):
    begun = []
    monkeypatch.setattr("tpuswarm.fleet.keeping.fleets.detach", lambda fleet, store, file: begun.append(file))

    def fails(*about):
        assert begun, "its keeper begins first"
        raise RunFailed("not all of it can be had")

    monkeypatch.setattr("tpuswarm.cli.bring.work", fails)
    storage = '\n[storage]\nbucket = "my-bucket"\nregion = "us-central1"\n'
    (here.folder / "swarm.toml").write_text("allow_cross_region = true\n" + SWARM + storage)
    monkeypatch.setattr("tpuswarm.cli.bring.label_bucket", lambda *about: None)
    assert "it is kept in the background" in here.run("up --yes --keep", code=1)
    assert begun == [Path("swarm.toml")]


def test_a_setup_that_was_taken_out_is_forgotten(here):
    kept = KeptSetup(find("swarm.toml")[0])
    kept.keep(Setup(pip=("einops",)))
    assert kept.table() is not None
    here.run("up --yes")
    assert kept.table() is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({'recipe = "gpt2-tiny"': 'recipe = "gpt2-tny"'}, "gpt2-tiny"),
        ({'recipe = "gpt2-tiny"': 'recipe = "gpt2-tiny"\noptions = { layer = 2 }'}, "has no option layer"),
        ({'pip = ["tpuswarm[gcloud,tpu]"]': 'pip = ["numpy"]'}, "[setup] must bring tpuswarm to the machines"),
        ({'[storage]\nbucket = "my-bucket"\nregion = "us-central1"\n': ""}, "has no [storage]"),
        ({"steps = 100": 'steps = 100\nrun = "runs/all"'}, "a folder of one machine, and machines come and go"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_rented(here, wrong, said):
    text = TRAINED
    for old, new in wrong.items():
        assert old in text
        text = text.replace(old, new)
    (here.folder / "swarm.toml").write_text(text)
    assert said in here.run("train swarm.toml --yes --paid", 2)
    assert here.cloud.there == {}
    assert "--steps stands in [train]" in here.run("train swarm.toml --steps 3", 2)
