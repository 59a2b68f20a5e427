"""Train one model over a fleet: its jobs, the shared secret, batch sizes, and the overview of machines and members."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.fleet.conftest import job_lines
from tests.fleet.loop import FLEET, ZONE, machine, pool, vm
from tpuswarm.cloud.protocol import Listing
from tpuswarm.doctor.cloud import check_jobs
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet import training
from tpuswarm.fleet.activity import count_activities, list_activities
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.jobs import Assignment, Job
from tpuswarm.fleet.store.document import Document, KeeperLease
from tpuswarm.fleet.view import summary_lines
from tpuswarm.remote.host import Host, HostTimeout
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.engines.ports import Ports, parse_ports
from tpuswarm.swarm.views.status import MemberStatus, RunView, SwarmStatus
from tpuswarm.watch.state import Machines, State

NOW = 10_000.0


def test_jobs_have_separate_ports_and_expect_all_members(read):
    found = job_lines(read())
    assert list(found) == ["head", "members-small", "members-slice"]
    assert "--expect 102 --ports ${TPUSWARM_HEAD_PORTS:-20000-20999}" in found["head"]
    assert all(found[name].endswith("--ports ${TPUSWARM_MEMBER_PORTS:-21000-21999}") for name in list(found)[1:])


def test_head_admits_members_from_anywhere_if_the_file_says_so(read):
    file = read()
    assert "--listen" not in job_lines(file)["head"]
    file = file.model_copy(update={"head": file.head.model_copy(update={"listen": True})})
    assert " --listen ${TPUSWARM_LISTEN:-8443}; code=$?" in job_lines(file)["head"]
    assert "admits members from anywhere" in training.train_jobs(file)[0].says


def test_aggregators_run_on_machines_that_the_file_names(read):
    vm = '[[vm]]\nname = "net"\ntype = "n2-standard-8"\nzone = "us-central1-f"\nrole = "aggregators"'
    file = read(before=vm)
    file = file.model_copy(update={"pool": (file.pool[0].model_copy(update={"role": "both"}), file.pool[1])})
    lines = job_lines(file)
    assert list(lines) == ["head", "members-small", "members-slice", "aggregators-net"]
    roles = {name: line.partition(" --role ")[2] for name, line in lines.items()}
    assert roles == {"head": "", "members-small": "both", "members-slice": "", "aggregators-net": "aggregators"}
    assert [job.where for job in training.train_jobs(file)][-1] == "net"


def test_port_range_is_checked():
    assert parse_ports("20000-20999") == Ports(20000, 20999)
    for wrong in ("20000", "20999-20000", "20000-20010", "80-2000", "65000-65540", "a-b"):
        with pytest.raises(InputError, match="--ports is FIRST-LAST such as 20000-20999"):
            parse_ports(wrong)


@pytest.mark.parametrize(
    "line", ['keep_best = "eval_loss"', "overfit_batches = 1", "fast_dev_run = true", "profile = true"]
)
def test_option_for_a_single_process_is_refused(read, line):
    with pytest.raises(InputError, match=f"^train.{line.split()[0]} is for a run of one process, not for members"):
        training.train_jobs(read(line))


def test_head_logs_to_wandb_only_with_a_key_and_the_package(read):
    def wandb_lines(setup: str, *provider: str) -> dict[str, str]:
        return job_lines(read('wandb = "a project"', f"[setup]\n{setup}", *provider))

    google, key = 'provider = "google"\nproject = "my-project-123"', 'secrets = ["WANDB_API_KEY"]'
    for setup in ("", 'secrets = ["OTHER"]'):
        with pytest.raises(InputError, match=r"^train.wandb needs a key on the head: add secrets = \[\"WANDB_API_KEY"):
            wandb_lines(setup)
    with pytest.raises(InputError, match=r"^train.wandb needs the package of W&B on the head"):
        wandb_lines(f'{key}\npip = ["tpuswarm[gcloud,tpu]"]', google)
    for found in (wandb_lines(key), wandb_lines(f'{key}\npip = ["tpuswarm[gcloud,tpu,wandb]"]', google)):
        assert "--wandb 'a project'" in found["head"]
        assert not any("wandb" in line for name, line in found.items() if name != "head")


def test_accepting_other_code_leaves_the_heads_job_the_same(read):
    usual, accepts = job_lines(read())["head"], job_lines(read(), accept_code=True)["head"]
    assert "--accept-code" in accepts and "--accept-code" not in usual
    assert training.is_same_command(usual, accepts) and not training.is_same_command(accepts, usual)
    assert not training.is_same_command(usual.replace("--steps 100", "--steps 200"), accepts)


@pytest.fixture
def secrets(monkeypatch):
    """The secret on each host, by label; a host with None is silent."""
    held: dict[str, str | None] = {}

    async def give(connections, host, secret):
        if host.label in held and held[host.label] is None:
            raise HostTimeout(host, 1.0, "was not done")
        held[host.label] = secret

    async def find(connections, host):
        return held.get(host.label)

    monkeypatch.setattr(training, "give_token", give)
    monkeypatch.setattr(training, "read_token", find)
    return held


def swarm_jobs(head: str) -> list[Job]:
    line = f"python -m tpuswarm train --token-file ~/{training.TOKEN_FILE}"
    return [
        Job("head", "head", line, "always", (Assignment("head", head, phase="running"),)),
        Job("members-small", "small", line, "always", (Assignment("small", "a", phase="running"),)),
        Job("mine", "small", "python mine.py", "always", (Assignment("small", "a"),)),
    ]


def test_new_head_creates_a_secret_that_all_members_get(secrets):
    hosts = {
        (name, 0): Host(f"{name}/0", "127.0.0.1", 22, "me", name, (), Path("known"))
        for name in ("first", "second", "a", "b")
    }
    head, members, other = swarm_jobs("first")

    def start(job: Job, machine: str, jobs: list[Job], without: str = "") -> None:
        reachable = {key: host for key, host in hosts.items() if key[0] != without}
        asyncio.run(training.share_token(None, job, hosts[machine, 0], jobs, reachable))  # type: ignore[arg-type]

    start(other, "a", [head])
    assert secrets == {}, "another job needs none"
    secrets["b/0"] = None
    start(head, "first", [head], without="second")
    first = secrets["first/0"]
    assert first and secrets["a/0"] == first and secrets["b/0"] is None, "a silent host delays nobody"

    secrets["b/0"] = "old"
    start(members, "b", [head, members])
    assert secrets["b/0"] == first

    start(head, "second", swarm_jobs("second"))
    assert secrets["second/0"] != first and secrets["a/0"] == secrets["b/0"] == secrets["second/0"]

    before = dict(secrets)
    start(members, "a", swarm_jobs("unreachable"))
    assert secrets == before, "without the head, the member's secret may be right"
    secrets["second/0"] = None
    with pytest.raises(HostTimeout):
        start(head, "second", swarm_jobs("second"))


def member(name: str, state="alive", speed: float | None = 41_000.0) -> MemberStatus:
    return MemberStatus(f"j-{name}", state, 7, "abc", 12, 1000, speed, 2.5, 1.0, 0)


@pytest.fixture
def overview() -> tuple[Document, Listing, list[Event], list[MemberStatus]]:
    assignments = (
        Assignment("small", "s-0", phase="running", run=1),
        Assignment("small", "s-1", phase="running", run=2, lost=1),
        Assignment("small", "s-2", phase="waiting", why="s-2 is being set up"),
        Assignment("small", "s-3", phase="running", run=1),
    )
    head, members, _ = swarm_jobs("all-head")
    net = Job("aggregators-net", "net", members.line, "always", (Assignment("net", "all-net", phase="running"),))
    jobs = (head, Job("members-small", "small", members.line, "always", assignments), net)
    lease = KeeperLease("x", "all-head", 1, 1, NOW)
    fleet = Desired(FLEET, (pool("small", 6), vm("head"), vm("net")))
    document = Document("all", "google", "project", fleet, (ZONE,), lease=lease, jobs=jobs)
    machines = [machine(f"s-{number}", created=NOW - 600) for number in range(4)]
    machines += [machine("s-4", "creating", created=NOW - 600), machine("all-head", created=NOW - 600, pool="head")]
    machines.append(machine("all-net", created=NOW - 600, pool="net"))
    events = [
        Event(NOW - 900, "small", "s-5", "ready", "it is ready"),
        Event(NOW - 750, "small", "s-5", "preempted", "the cloud took it away"),
        Event(NOW - 720, "small", "s-5", "refused", f"{ZONE}: There is no more capacity"),
        Event(NOW - 20, "small", "s-5", "refused", f"{ZONE}: There is no more capacity"),
        Event(NOW - 30, "small", "s-4", "creating", "the cloud calls it CREATING"),
    ]
    statuses = [member("s-0"), member("s-1"), member("s-3", "joining", None), member("far")]
    return document, Listing(tuple(machines), frozenset()), events, statuses


def test_overview_combines_machines_jobs_and_members(overview):
    document, listing, events, members = overview
    found = {row.machine or row.pool: row for row in list_activities(document, listing, events, members, NOW)}
    missing = f"1 v2-8 missing: s-5 was preempted 12 min ago; waiting since 12 min: {ZONE}: There is no more capacity"
    assert {name: (row.kind, row.why) for name, row in found.items()} == {
        "small": ("missing", missing),
        "s-4": ("not ready", "creating since 30 s"),
        "s-2": ("not ready", "s-2 is being set up"),
        "s-3": ("joining", "joining"),
        "all-head": ("head", "the head and the keeper"),
        "all-net": ("head", "aggregators"),
        "j-far": ("training", "alive, on a machine outside the fleet"),
        "s-0": ("training", "training"),
        "s-1": ("training", "training, lost before"),
    }
    without = {row.machine: row for row in list_activities(document, listing, events, None, NOW)}
    assert (without["s-0"].kind, without["s-0"].why) == ("joining", "waiting for the head")
    assert count_activities(list(found.values())) == "3 training, 1 joining, 2 not ready, 1 missing"


ERROR = "error: 12 rows do not divide over 8 devices"


def with_failed_members(document: Document, *phases: str) -> Document:
    """Let the members on s-0 and s-1 fail again and again."""
    head, members, net = document.jobs
    failed = [
        replace(it, phase=phase, error=ERROR, same_errors=3, why=ERROR)
        for it, phase in zip(members.assignments, phases, strict=False)
    ]
    return replace(document, jobs=(head, replace(members, assignments=tuple(failed)), net))


def test_every_view_says_why_members_fail(overview):
    document, listing, events, members = overview
    document = with_failed_members(document, "running", "failed")
    found = {row.machine: row.why for row in list_activities(document, listing, events, members[2:], NOW)}
    assert found["s-0"] == f"joining; its last run failed: {ERROR}" and found["s-1"] == f"failed: {ERROR}"
    sentence = f"job members-small has failed on s-1 and on 1 more: {ERROR}"
    assert any(line.startswith(sentence) for line in summary_lines(document, listing, NOW))
    (finding,) = check_jobs(document)
    assert (finding.check, finding.problem) == ("job", sentence) and "then start it again" in finding.advice
    (running,) = check_jobs(with_failed_members(document, "running"))
    assert "it runs again by itself" in running.advice
    assert [*check_jobs(document, "s-1/0")] == [*check_jobs(document, "small")] == [finding]
    assert not [*check_jobs(document, "slice")]


def test_training_ends_with_the_error_if_all_members_or_the_head_failed_for_good(overview):
    document, listing, events, _ = overview

    def require(document: Document) -> None:
        State("gs://b/runs/all", None, Machines(document, listing, events), NOW).require_jobs()

    require(with_failed_members(document, "running", "failed"))
    with pytest.raises(RunFailed, match=rf"^the training has ended: {ERROR}. Its machines cost \$.* an hour: fix it"):
        require(with_failed_members(document, "failed", "failed"))
    head = replace(document.jobs[0], assignments=(Assignment("head", "all-head", phase="failed", why="no bucket"),))
    with pytest.raises(RunFailed, match=r"^the training has ended: no bucket"):
        require(replace(document, jobs=(head, document.jobs[1])))


def draw(state: State, width: int, height: int | None) -> list[str]:
    screen = Console(width=width, height=height or 60, file=io.StringIO())
    screen.print(state.draw(width, height))
    return screen.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("height", [22, None])
def test_overview_fits_a_terminal_and_drops_healthy_members_first(overview, height):
    document, listing, events, members = overview
    status = SwarmStatus(
        NOW, NOW - 60, 12, 1, "open", 10_000, Tokens(6_000, 5_000, 0, 1_000, 0), 1.0, 82_000.0, 0, 7_200.0, 2.5, 2.6,
        10, tuple(members), (), "", {}, carried=3 * 2**30,
    )  # fmt: skip
    look = RunView("gs://b/runs/all", "gpt2-tiny", "running", 1, "", 100, 100, "tokens", status)
    found = draw(State("gs://b/runs/all", look, Machines(document, listing, events), NOW), 80, height)
    text = " ".join(" ".join(found).split())
    assert all(len(line) <= 80 for line in found) and (height is None or len(found) <= height), found
    assert ("41,000" in text) == (height is None)
    assert all(words in text for words in ("no more capacity", "2.0 hours left", "3.00 GiB carried")), text
    soon = replace(look, status=replace(status, left=90.0))
    text = " ".join(draw(State("gs://b/runs/all", soon, Machines(document, listing, events), NOW), 80, height))
    assert "; 1 min left, $" in text
    killed = State("gs://b/runs/all", replace(look, state="killed"), Machines(document, listing, events), NOW)
    assert "its head is gone: a keeper starts another one" in " ".join(draw(killed, 80, height))


def test_overview_shows_machines_before_the_run_begins(overview):
    document, listing, events, _ = overview
    state = State("gs://b/runs/all", None, Machines(document, listing, events), NOW)
    assert "gs://b/runs/all has not begun" in "\n".join(draw(state, 120, None))
    found = state.json()
    assert (found["state"], len(found["machines"])) == ("not begun", 8)
