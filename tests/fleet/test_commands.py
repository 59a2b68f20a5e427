"""The fleet commands on a fake cloud: previews, a life from up to down, interruptions and mistakes."""

import io
import json
import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from tests.fleet.conftest import GOLDEN
from tpuswarm.cli.fleet import fleet_training
from tpuswarm.cli.fleet.view import _draw_fleet, open_fleet
from tpuswarm.cli.machine.jobs import run_jobs_until
from tpuswarm.cloud.errors import Unreachable
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine, Worker
from tpuswarm.errors import RunFailed
from tpuswarm.fleet.decide.choose_actions import DELETE_RETRY_S
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.fleet_state import WorkStatus
from tpuswarm.fleet.decide.jobs import Assignment, Job
from tpuswarm.fleet.hosts.setup import SavedSetup
from tpuswarm.fleet.store.document import KeeperLease, document_path
from tpuswarm.fleet.store.fleets import Fleet, find_fleet
from tpuswarm.fleet.view import machine_rows, machines_table
from tpuswarm.remote.setup.table import Setup
from tpuswarm.train.process.computer import computer_id

SWARM, TRC = ((GOLDEN / f"{name}.toml").read_text() for name in ("swarm", "trc"))
STORAGE = '\n[storage]\nbucket = "my-bucket"\nregion = "us-central1"\n'
TRAINED = f"""allow_cross_region = true
{SWARM}{STORAGE}
[setup]
pip = ["tpuswarm[gcloud,tpu]"]

[train]
recipe = "gpt2-tiny"
data = "fake"
steps = 100
cycle = 8
"""
PREVIEWS = {
    "up-trc": (TRC, "up --dry-run"),
    "up-scale": (TRC, "up --dry-run --scale small=120 --scale five=0 --paid"),
    "up-not-paid": (TRC, "up --dry-run --scale five=6"),
    "up-swarm": (SWARM, "up --dry-run"),
    "up-command": (SWARM, "up --dry-run --type v2-8 --zone us-central1-f --spot --keep -- python train.py"),
    "up-one": (SWARM, "up --dry-run --type v3-8 --zone europe-west4-a --name node-1"),
    "train-swarm": (TRAINED, "train swarm.toml --dry-run"),
}
A = "us-central1-f"
FLEET_OF_FILE = Fleet("gpt2", "google", "my-project", None)


@pytest.mark.parametrize("name", PREVIEWS)
def test_preview_matches_the_golden_file_and_requests_nothing(name, cli, golden):
    text, line = PREVIEWS[name]
    cli.write(text)
    golden(name, line, cli.run(line))
    assert cli.cloud.requests == [] and not (cli.folder / "state").exists()


@pytest.mark.parametrize("line", ["up --dry-run", "catalog"])
def test_old_prices_are_called_old(cli, monkeypatch, line):
    monkeypatch.setattr("tpuswarm.catalog.prices.MAX_AGE_DAYS", -1)
    assert "the prices are old: they were read on 20" in cli.run(line)


def test_fleet_from_up_to_down(cli, golden):
    out = cli.run("up --yes")
    assert cli.ready == ["gpt2-head", "gpt2-router", "v2-usc1f-0", "v2-usc1f-1", "v3-euw4a-0", "v5e-usw4a-0"]
    assert "no keeper runs from now on" in out and "v3-euw4a-0: ready: it is ready" in out
    assert "no machine needs a change" in cli.run("up --yes")

    out = cli.run("router show --from swarm.toml")
    assert "# port 22000: v2-usc1f-0/0" in out and "# port 22001: v2-usc1f-1/0" in out and "gpt2-head" not in out
    assert f"22000 : {cli.cloud.existing[A, 'v2-usc1f-0'].workers[0].internal} . 22" in out
    assert "give one of ROUTER.toml and --from" in cli.run("router show", 2)
    text = (cli.folder / "swarm.toml").read_text()
    cli.write(text.replace('role = "router"\n', 'role = "router"\nports = [22, 8470]\n'))
    cli.run("up --yes")
    out = cli.run("router show --from swarm.toml")
    assert "# port 22001: v2-usc1f-1/0, port 22" in out and "# port 23001: v2-usc1f-1/0, port 8470" in out
    assert f"23001 : {cli.cloud.existing[A, 'v2-usc1f-1'].workers[0].internal} . 8470" in out
    cli.write(text)

    cli.cloud.preempt((A, "v2-usc1f-1"))
    out = cli.run("up --yes")
    assert "1. delete v2-8 in us-central1-f: v2-usc1f-1; the cloud took it away (PREEMPTED)" in out
    assert "2. create v2-8 (spot, TPU API) in us-central1-f: v2-usc1f-1; $1.35 an hour" in out
    assert "total: 6 machines" in out and len(cli.ready) == 6
    preemptions = {row["name"]: row["preemptions"] for row in json.loads(cli.run("list --json"))["machines"]}
    assert preemptions["v2-usc1f-1"] == 1 and preemptions["v2-usc1f-0"] == 0
    listed = cli.run("list")
    assert max(map(len, listed.splitlines()[:7])) <= 80, "the table"
    assert "no keeper runs, so nothing lost is replaced" in listed
    assert "the cloud took it away after" in cli.run("describe v2-usc1f-1")
    assert json.loads(cli.run("cost --json"))["pools"]["small"]["hourly"]["dollars"] == pytest.approx(2.7)

    assert "v5e-usw4a-0 is a pod of 4 hosts" in cli.run("pause v5e", code=2)
    assert "v2-usc1f-0 is spot, so it could not be resumed" in cli.run("pause v2-usc1f-0", code=2)
    cli.run("pause v3 --yes")
    assert cli.cloud.names("stopped") == ["v3-euw4a-0"]
    assert re.search(r"v3-euw4a-0 .* stopped .* – +–\n", cli.run("list"))
    assert "price: nothing while it is stopped" in cli.run("describe v3")
    asked_at = cli.cloud.now
    cli.run("resume v3 --yes")
    assert len(cli.ready) == 6 and cli.cloud.now - asked_at < DELETE_RETRY_S, "it waits for the machine alone"

    cli.run("down v2-usc1f-0 --yes")
    assert "v2-usc1f-0" not in cli.ready and len(cli.cloud.existing) == 5
    cli.run("up --yes --scale small=0")
    assert len(cli.cloud.existing) == 4
    cli.cloud.add_foreign("theirs", A)
    golden("down", "down --dry-run", cli.run("down --dry-run"))
    out = cli.run("down --yes")
    assert cli.cloud.names() == ["theirs"] and "create it again: `tpuswarm up`" in out
    assert "project model lists nothing with the id gpt2-abc234 any more" in out
    listed = cli.run("list")
    assert "the fleet is down: requested by `tpuswarm down`; it has cost $" in listed and "keep" not in listed
    assert cli.run("down --yes").startswith("gpt2-abc234 is deleted already: requested by `tpuswarm down`")
    cli.run("up --yes")
    assert len(cli.ready) == 7
    for end in ("down --yes", "down v3 --yes"):
        cli.run("pause v3 --yes")
        cli.run(end)
        cli.run("up --yes")
        assert len(cli.ready) == 7, "a pause ends with its machine"
    cli.run("pause v3 --yes")
    del cli.cloud.existing[next(key for key in cli.cloud.existing if key[1] == "v3-euw4a-0")]
    assert "v3-euw4a-0 was paused and no longer exists" in cli.run("pause gpt2-router --yes")
    cli.run("up --yes")
    assert len(cli.ready) == 6 and cli.cloud.names("stopped") == ["gpt2-router"]


def test_single_tpu_has_the_project_network_runtime_and_metadata_of_its_options(cli):
    given = "--project other-project --network tpu --runtime tpu-vm-base --metadata startup-script=uptime"
    out = cli.run(f"up --dry-run --type v3-32 --zone europe-west4-a {given}")
    wanted = "--version=tpu-vm-base", "--network=tpu --subnetwork=tpu", "startup-script=uptime"
    assert all(words in out for words in (*wanted, "--project=other-project")), out


def test_tpus_without_a_file_are_fleets_of_their_own_that_commands_name(cli, monkeypatch):
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "my-project")
    (cli.folder / "swarm.toml").unlink()
    for name in ("node-1", "node-2"):
        cli.run(f"up --type v3-8 --zone europe-west4-a --name {name} --yes")
    assert cli.ready == ["node-1", "node-2"]
    assert "node-1: v3-8 (on-demand)" in cli.run("describe node-1 --fleet node-1")
    job = Job("main", "all", "true", "always", (Assignment("node-1", phase="done", why="exit 0"),))
    store = Fleet("node-1", "google", "my-project", None).store(cli.cloud)
    store.change(lambda document: replace(document, jobs=(job,)))
    assert "--fleet my-project/node-1 or --fleet my-project/node-2" in cli.run("logs main", code=2)
    assert "exit 0" in cli.run("logs main --fleet node-1")
    assert "job main has ended: done" in cli.run("stop main --fleet node-1", code=2)
    assert "fleet node-2 has no job or machine main" in cli.run("stop main --fleet node-2", code=2)
    assert "main" in cli.run("jobs --fleet node-1") and "no jobs" in cli.run("jobs --fleet node-2")
    assert "no flags are set" in cli.run("flags show --fleet node-2")
    cli.run("down node-1 --fleet node-1 --yes")
    assert cli.ready == ["node-2"]


def test_interrupted_command_lists_what_exists_and_continues_when_repeated(cli, monkeypatch):
    def interrupt(line: str, sleeps: int) -> str:
        remaining = iter(range(sleeps))

        def sleep(seconds: float) -> None:
            if next(remaining, None) is None:
                raise KeyboardInterrupt
            cli.cloud.advance(20)

        with monkeypatch.context() as interrupted:
            interrupted.setattr("time.sleep", sleep)
            return cli.run(line, code=130)

    out = interrupt("up --yes", sleeps=2)
    assert "machines still cost money" in out and "the same command continues" in out
    assert out.count("no keeper runs") == 1
    assert "6 machines exist: gpt2-head (creating), gpt2-router (creating)" in out
    cli.run("up --yes")
    assert len(cli.ready) == 6
    assert "6 machines exist" in interrupt("down --yes", sleeps=0)
    cli.run("down --yes")
    assert cli.cloud.existing == {}


@pytest.mark.parametrize(("line", "verb"), [("up --yes", "requested"), ("down --yes", "deletion requested")])
def test_command_interrupted_between_requests_names_every_machine_that_was_requested(cli, monkeypatch, line, verb):
    cli.write(TRC)
    if line.startswith("down"):
        cli.run("up --yes --scale small=20")
    name = "delete" if line.startswith("down") else "create"
    real, done = getattr(cli.cloud, name), []

    def interrupted(about):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(about.name)
        return real(about)

    with monkeypatch.context() as patched:
        patched.setattr(cli.cloud, name, interrupted)
        patched.setattr("tpuswarm.cli.fleet.progress.MAX_NAMES", 1000)
        out = cli.run(line, code=130)
    (found,) = re.finditer(r"\d+ machines (exist|were requested): ", out)
    told = " ".join(out[found.start() :].split())
    assert len(done) >= 3 and verb in told and "machines still cost money" in told
    for machine in done:
        assert f"{machine} (deletion requested)" in told if name == "delete" else f"/{machine}" in told
    assert set(cli.cloud.names("creating")) <= set(done)


def test_damaged_or_lost_document_is_restored_from_the_file_and_labels(cli):
    cli.run("up --yes")
    path = cli.folder / "state/tpuswarm/documents/my-project" / document_path("gpt2")
    path.write_bytes(b"7\n{broken")
    assert "is damaged (7 bytes)" in cli.run("list", code=1)
    assert "is damaged (7 bytes)" in cli.run("up --yes")
    assert len(cli.cloud.existing) == len(cli.ready) == 6
    path.unlink()
    assert "is lost; it is made again" in cli.run("up --yes")
    assert len(cli.cloud.existing) == 6


def test_document_of_a_newer_version_is_never_overwritten(cli):
    cli.run("up --yes")
    path = cli.folder / "state/tpuswarm/documents/my-project" / document_path("gpt2")
    generation, _, text = path.read_text().partition("\n")
    document = json.loads(text) | {"format": 2}
    for changed in document, {name: value for name, value in document.items() if name != "desired"}:
        path.write_text(newer := f"{generation}\n{json.dumps(changed)}")
        for command in ("list", "up --yes", "down --yes"):
            assert "gpt2.json: format 2 is unknown to tpuswarm" in cli.run(command, code=2)
        assert path.read_text() == newer and len(cli.ready) == 6


def test_fleet_that_ended_by_itself_comes_up_again_without_its_old_jobs(cli):
    cli.write(SWARM.replace('"idle 30m"', '"done"'))
    cli.run("up --yes")
    store = FLEET_OF_FILE.store(cli.cloud)
    job = Job("main", "small", "true", "preempted", (Assignment("small", "v2-usc1f-0", 1, "running"),))

    def end(found):
        wanted = replace(found.desired, down="the work is done", revision=2)
        return replace(found, jobs=(job,), work=WorkStatus(done=True), desired=wanted)

    store.change(end)
    with pytest.raises(RunFailed, match="fleet gpt2 is being deleted"):
        run_jobs_until(FLEET_OF_FILE, "main", lambda job: job.is_over)
    cli.run("keep")
    assert cli.cloud.existing == {}
    cli.run("up --yes")
    assert len(cli.ready) == 6
    document = store.load()
    assert document.work == WorkStatus() and document.desired.down is None and document.jobs[0].is_over


def test_machines_of_an_unknown_fleet_are_listed_and_deleted_on_request(cli):
    cli.run("up --yes")
    labels = {FLEET_LABEL: "gpt3-zzzzzz", POOL_LABEL: "small"}
    cli.cloud.add_foreign("v2-usc1f-9", A, labels=labels)
    assert "not of this fleet: 1 of fleet gpt3-zzzzzz: v2-usc1f-9" in cli.run("list")
    out = " ".join(cli.run("logs v2-usc1f-9", code=2).split())
    assert out.startswith("error: v2-usc1f-9 belongs to another fleet, gpt3-zzzzzz")
    assert "`tpuswarm down --orphans gpt3-zzzzzz` deletes its machines" in out
    assert "no machine carries the id nobody" in cli.run("down --orphans nobody", code=2)
    cli.run("down --orphans gpt3-zzzzzz --yes")
    assert len(cli.cloud.existing) == len(cli.ready) == 6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("up", "there is no terminal to ask on: add --yes"),
        ("up --scale smal=3", "there is no pool 'smal'; did you mean small?"),
        ("up --scale small=many", "--scale takes POOL=N with N from 0 to 1,000, such as small=20, not 'small=many'"),
        ("up swarm.toml --type v2-8", "give a file or --type, not both"),
        ("up --network tpu", "--runtime, --metadata and --down-when need --type; a fleet's file has them"),
        ("up --type v2-8 --metadata uptime", "--metadata takes KEY=VALUE, such as startup-script=uptime"),
        ("up --type v2-8 --zone us-west1-a", "no list has a v2-8 in us-west1-a; zones that have it: asia-east1-c"),
        ("up none.toml", "there is no file none.toml"),
        ("list", "there is no fleet gpt2 in project model. Create it: `tpuswarm up`"),
    ],
)
def test_wrong_command_is_explained_and_changes_nothing(cli, line, message):
    assert message in cli.run(line, code=2)
    assert set(cli.cloud.requests) <= {"machines"}


def test_wrong_change_of_a_running_fleet_is_refused(cli):
    cli.run("up --yes")
    cli.cloud.requests.clear()
    assert "there is no machine 'nobody'" in cli.run("down nobody", code=2)
    cli.write(SWARM.replace('type = "v2-8"', 'type = "v3-8"'))
    assert "pool small is of v2-8 (spot, TPU API) and would become v3-8 (spot, TPU API)" in cli.run("up --yes", code=2)
    assert set(cli.cloud.requests) <= {"machines"}
    for scale in ("--scale small=0", ""):  # the way out that the message names
        cli.run(f"up --yes {scale}")
    assert {machine.type for machine in cli.cloud.existing.values() if machine.pool == "small"} == {"v3-8"}


def test_up_fails_with_a_reason_if_some_machines_cannot_be_created(cli):
    cli.write(TRC)
    out = cli.run("up --yes --scale five=6 --scale small=1", code=1)
    assert "some machines cannot be created: 1 of pool five: europe-west4-a: no grant covers another v3-8" in out
    assert len(cli.ready) == 6
    why = "1 v3-8 missing: europe-west4-a: no grant covers another v3-8"
    assert f"pool five: {why}" in cli.run("list") and why in json.loads(cli.run("list --json"))["missing"][0]["why"]
    assert "no grant covers another v3-8" in cli.run("doctor cloud", code=1)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_live_list_fits_its_screen_and_drops_healthy_machines_first(cli, width, height):
    cli.write(TRC)
    cli.run("up --yes --scale small=60")
    cli.cloud.preempt((A, "v2-usc1f-57"))
    _, read = open_fleet(None)
    screen = Console(width=width, height=height, file=io.StringIO())
    screen.print(_draw_fleet(*read(), screen.width, screen))
    lines = screen.file.getvalue().splitlines()
    assert len(lines) == height - 1 and max(map(len, lines)) <= width, lines
    assert lines[1].startswith("v2-usc1f-57  v2-8") and "preempted" in lines[1]
    assert any(line.startswith("and ") and line.rstrip().endswith("more") for line in lines)
    assert sum(line.startswith("grant of ") for line in lines) == 2


def test_states_have_one_word_in_all_apis_and_unknown_prices_no_column():
    def machine(name: str, **about: object) -> Machine:
        return Machine(name, A, "tpu", "v99-8", labels={FLEET_LABEL: "f", POOL_LABEL: "a"}, **about)

    machines = (
        machine("a", state="ready", said="RUNNING"), machine("b", state="ready", said="READY"),
        machine("c", state="creating", said="PROVISIONING"), machine("d", state="dead", said="PREEMPTED"),
    )  # fmt: skip
    rows = machine_rows(Desired("f", pools=()), Listing(machines, frozenset()), (), 0.0)
    screen = Console(width=60, file=io.StringIO())
    screen.print(machines_table(rows, screen.width))
    heads, *lines = screen.file.getvalue().splitlines()
    assert heads.split() == ["machine", "type", "zone", "state", "age"]
    assert [line.split()[3] for line in lines] == ["ready", "ready", "creating", "preempted"]


def test_killed_keeper_is_not_believed_and_a_living_one_is_not_denied(cli):
    cli.run("up --yes")
    store = FLEET_OF_FILE.store(cli.cloud)
    with subprocess.Popen(["true"]) as ended:
        pass
    killed = KeeperLease("k", "here", ended.pid, 1, time.time(), computer_id())
    store.change(lambda document: replace(document, lease=killed))
    assert "kept by" not in cli.run("list") and f"process {ended.pid} of this computer, has ended" in cli.run("list")
    assert "no keeper runs" in cli.run("doctor cloud", code=1)
    store.change(lambda document: replace(document, lease=replace(killed, pid=os.getpid())))
    out = cli.run("up --yes")
    assert "does the work; this command watches it" in out and "no keeper runs" not in out
    assert "kept by here" in cli.run("list")


def test_doctor_finds_machines_that_cost_without_use(cli):
    cli.run("up --yes")
    cli.cloud.update((A, "v2-usc1f-0"), healthy=False, why="HBM_ECC")
    labels = {FLEET_LABEL: "gpt2-abc234", POOL_LABEL: "former"}
    cli.cloud.add_foreign("left", A, labels=labels, workers=(Worker("10.0.0.9", None),))
    out = " ".join(cli.run("logs left", code=2).split())
    assert "left has no pool in the fleet now: `tpuswarm list` shows it" in out and "no run" not in out
    cli.cloud.capacity["us-west4-a"] = 0
    cli.cloud.update(("us-west4-a", "v5e-usw4a-0"), state="waiting", created=cli.cloud.now - 3 * 86400)
    found = {finding["check"]: finding for finding in json.loads(cli.run("doctor cloud --json", 1))["found"]}
    assert {check: finding["of"] for check, finding in found.items()} == {
        "keeper": "gpt2", "health": "v2-usc1f-0", "orphan": "left", "waits": "v5e-usw4a-0",
    }  # fmt: skip
    assert "HBM_ECC" in found["health"]["what"] and "swarm.toml has no pool former" in found["orphan"]["what"]
    assert found["orphan"]["what"].startswith("a v2-8 in us-central1-f for $4.50 an hour")
    assert found["orphan"]["mend"] == "`tpuswarm down left`"


def test_failed_up_keep_leaves_a_background_keeper(cli, monkeypatch):
    started = []
    monkeypatch.setattr(
        "tpuswarm.fleet.store.fleets.start_background_keeper", lambda fleet, store, file: started.append(file)
    )

    def fail(*_):
        assert started, "the keeper starts first"
        raise RunFailed("some machines cannot be created")

    monkeypatch.setattr("tpuswarm.cli.fleet.apply.run_keeper", fail)
    monkeypatch.setattr("tpuswarm.cli.fleet.apply.label_bucket", lambda *_: None)
    cli.write(f"allow_cross_region = true\n{SWARM}{STORAGE}")
    assert "the keeper runs in the background" in cli.run("up --yes --keep", code=1)
    assert started == [Path("swarm.toml")]


def test_setup_removed_from_the_file_is_forgotten(cli):
    stored = SavedSetup(find_fleet("swarm.toml")[0])
    stored.save(Setup(pip=("einops",)))
    assert stored.table() is not None
    cli.run("up --yes")
    assert stored.table() is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"gpt2-tiny"', '"gpt2-tny"', "gpt2-tiny"),
        ('"gpt2-tiny"', '"gpt2-tiny"\noptions = { layer = 2 }', "has no option layer"),
        ('pip = ["tpuswarm[gcloud,tpu]"]', 'pip = ["numpy"]', "the machines need tpuswarm"),
        (STORAGE, "", "has no [storage]"),
        ("steps = 100", 'steps = 100\nrun = "runs/all"', "a folder on one machine, but machines come and go"),
    ],
)
def test_invalid_training_is_refused_before_anything_is_created(cli, old, new, message):
    assert old in TRAINED
    cli.write(TRAINED.replace(old, new))
    assert message in cli.run("train swarm.toml --yes --paid", 2)
    assert cli.cloud.existing == {}
    assert "--steps has to reach all machines: write it under [train]" in cli.run("train swarm.toml --steps 3", 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("../text.txt", "the bucket is full"),
        ("../stored.txt", "no machine can be made"),
        ("text.txt", ".env would leave this computer"),
    ],
)
def test_data_that_cannot_be_sent_is_named_before_anything_is_created(cli, monkeypatch, data, words):
    class Bucket:
        def __init__(self, url: str):
            pass

        def exists(self, name: str) -> bool:
            if name == "text.txt":
                raise RunFailed("the bucket is full")
            return True

        def read_if_there(self, name: str) -> None:
            return None

    folder = cli.folder / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    cli.folder = folder
    for path in (Path("text.txt"), Path("../text.txt"), Path("../stored.txt"), Path(".env")):
        path.write_text("words\n" * 500)
    for module in ("batches", "fleet_data", "train_fleet"):
        monkeypatch.setattr(f"tpuswarm.cli.train.{module}.Bucket", Bucket)
    monkeypatch.setattr("tpuswarm.cli.train.batches.no_compiler", lambda: "no compiler")
    monkeypatch.setattr("tpuswarm.cli.fleet.apply.label_bucket", lambda *_: None)
    created = Mock(side_effect=RunFailed("no machine can be made"))
    monkeypatch.setattr("tpuswarm.cli.fleet.apply.create_fleet", created)
    cli.write(TRAINED.replace('"fake"', f'"{data}"'))
    output = cli.run("train swarm.toml --yes --paid", 2 if "env" in words else 1)
    assert words in output and created.called == ("machine" in words)


def test_view_of_a_training_outlives_an_outage(monkeypatch):
    answers = iter([Unreachable("reading gs://b/run.json: Service Unavailable"), "finished"])

    def read(self):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return SimpleNamespace(run=SimpleNamespace(state=answer), draw=lambda width, height: answer)

    monkeypatch.setattr(fleet_training.FleetTraining, "read", read)
    monkeypatch.setattr(fleet_training, "POLL_INTERVAL_S", 0.0)
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    fleet_training.FleetTraining("gs://b/a", None).watch(screen)
    assert "Service Unavailable; trying again" in screen.file.getvalue()
