"""Train one model over a fleet: its jobs, the shared secret, batch sizes, and the overview of machines and members."""

import asyncio
import io
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.fleet.conftest import GOLDEN
from tests.fleet.loop import FLEET, ZONE, machine, pool, vm
from tpuswarm.cli.plan.pools import read_pools
from tpuswarm.cli.train import batches, fleet_data, train_fleet
from tpuswarm.cli.train.batches import choose_batches
from tpuswarm.cloud.protocol import Listing
from tpuswarm.config.train_table import Train
from tpuswarm.doctor.cloud import check_jobs
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet import training
from tpuswarm.fleet.activity import count_activities, list_activities
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.jobs import Assignment, Job
from tpuswarm.fleet.spec.file import SwarmFile, read_swarm
from tpuswarm.fleet.store.document import Document, KeeperLease
from tpuswarm.fleet.view import summary_lines
from tpuswarm.plan.compile.request import CompileRequest, CompileResult
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.remote.host import Host, HostTimeout
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.engines.ports import Ports, parse_ports
from tpuswarm.swarm.views.status import FINISHED, MemberStatus, RunView, SwarmStatus, write_status
from tpuswarm.watch.state import Machines, State

NOW = 10_000.0
TINY = GPT2(size="tiny")
FILE = (GOLDEN / "train.toml").read_text()


@pytest.fixture
def read(tmp_path):
    def read_file(train: str = "", before: str = "", provider: str = 'provider = "rehearsal"') -> SwarmFile:
        text = FILE.replace("[train]\n", f"{before}\n[train]\n{train}\n").replace('provider = "rehearsal"', provider)
        (tmp_path / "swarm.toml").write_text(text)
        return read_swarm(tmp_path / "swarm.toml")

    return read_file


def lines(file: SwarmFile, **options) -> dict[str, str]:
    return {job.name: job.line for job in training.train_jobs(file, **options)}


def test_jobs_have_separate_ports_and_expect_all_members(read):
    found = lines(read())
    assert list(found) == ["head", "members-small", "members-slice"]
    assert "--expect 102 --ports ${TPUSWARM_HEAD_PORTS:-20000-20999}" in found["head"]
    assert all(found[name].endswith("--ports ${TPUSWARM_MEMBER_PORTS:-21000-21999}") for name in list(found)[1:])


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
        return lines(read('wandb = "a project"', f"[setup]\n{setup}", *provider))

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
    usual, accepts = lines(read())["head"], lines(read(), accept_code=True)["head"]
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
    jobs = (head, Job("members-small", "small", members.line, "always", assignments))
    lease = KeeperLease("x", "all-head", 1, 1, NOW)
    fleet = Desired(FLEET, (pool("small", 6), vm("head")))
    document = Document("all", "google", "project", fleet, (ZONE,), lease=lease, jobs=jobs)
    machines = [machine(f"s-{number}", created=NOW - 600) for number in range(4)]
    machines += [machine("s-4", "creating", created=NOW - 600), machine("all-head", created=NOW - 600, pool="head")]
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
        "j-far": ("other", "alive, on a machine outside the fleet"),
        "s-0": ("training", "training"),
        "s-1": ("training", "training, lost before"),
    }
    without = {row.machine: row for row in list_activities(document, listing, events, None, NOW)}
    assert (without["s-0"].kind, without["s-0"].why) == ("joining", "waiting for the head")
    assert count_activities(list(found.values())) == "2 training, 1 other, 1 joining, 2 not ready, 1 missing"


ERROR = "error: 12 rows do not divide over 8 devices"


def with_failed_members(document: Document, *phases: str) -> Document:
    """Let the members on s-0 and s-1 fail again and again."""
    head, members = document.jobs
    failed = [
        replace(it, phase=phase, error=ERROR, same_errors=3, why=ERROR)
        for it, phase in zip(members.assignments, phases, strict=False)
    ]
    return replace(document, jobs=(head, replace(members, assignments=tuple(failed))))


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
    killed = State("gs://b/runs/all", replace(look, state="killed"), Machines(document, listing, events), NOW)
    assert "its head is gone: a keeper starts another one" in " ".join(draw(killed, 80, height))


def test_overview_shows_machines_before_the_run_begins(overview):
    document, listing, events, _ = overview
    state = State("gs://b/runs/all", None, Machines(document, listing, events), NOW)
    assert "gs://b/runs/all has not begun" in "\n".join(draw(state, 120, None))
    found = state.json()
    assert (found["state"], len(found["machines"])) == ("not begun", 7)


def test_auto_batch_is_the_largest_per_pool_that_divides_the_others(capsys):
    assert choose_batches({"a": 416}, {"a": 8}) == {"a": 416}
    assert choose_batches({"a": 416, "b": 768}, {"a": 8, "b": 8}) == {"a": 384, "b": 768}
    assert "a 384 (fits 416), b 768 (fits 768)" in capsys.readouterr().out
    assert choose_batches({"a": 416, "b": 3_000}, {"a": 8, "b": 256}) == {"a": 352, "b": 2_816}
    with pytest.raises(InputError, match=r"no batches suit all pools: .*a 100 on 8 devices, b 200 on 256 devices"):
        choose_batches({"a": 100, "b": 200}, {"a": 8, "b": 256})


def test_auto_batch_is_computed_once_per_run(read, tmp_path, monkeypatch):
    objects: dict[str, bytes] = {}
    computed: list[object] = []

    class Bucket:
        def __init__(self, url: str):
            self.exists, self.read, self.read_if_there = objects.__contains__, objects.__getitem__, objects.get

        def create(self, name: str, data: bytes) -> bool:
            return objects.setdefault(name, data) is data

    monkeypatch.setattr(batches, "Bucket", Bucket)
    monkeypatch.setattr(batches, "_choose", lambda file, train: computed.append(file) or {"small": 416, "slice": 832})
    read('batch = "auto"')
    path = tmp_path / "swarm.toml"

    def job_lines() -> list[str]:
        return list(lines(batches.resolve_batches(read_swarm(path), "gs://b/runs/all", TINY)).values())

    first = job_lines()
    assert "--batch 832 " in first[0] and first[1].endswith("--batch 416") and first[2].endswith("--batch 832")
    objects["files/config.toml"] = b""
    assert job_lines() == first and len(computed) == 1
    path.write_text(path.read_text().replace('name = "small"', 'name = "other"'))
    with pytest.raises(InputError, match="began with batches for the pools small, slice, and the file has other, sl"):
        job_lines()
    del objects["batches.json"]
    assert not any("--batch" in line for line in job_lines()), "a run that began with a number keeps it"


def test_training_again_does_not_restart_the_head_of_a_run_with_the_default_batch(read, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "read_file", lambda *_: None)
    first = lines(batches.resolve_batches(read(), "gs://b/runs/all", TINY))
    monkeypatch.setattr(batches, "read_file", lambda *_: b"[train]\nbatch = 16")
    assert lines(batches.resolve_batches(read(), "gs://b/runs/all", TINY)) == first


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
def test_finished_run_needs_no_machines_unless_it_becomes_longer(tmp_path, monkeypatch, phase, length, is_finished):
    tokens = Tokens(100_352, 100_352, 0, 0, 0)
    write_status(tmp_path, SwarmStatus(
        NOW, NOW, 12, 1, phase, 100_352, tokens, 1.0, 0.0, 0, None, 2.5, 2.6, 12, (), (), "", {}
    ))  # fmt: skip
    objects = {
        "files/status.json": (tmp_path / "status.json").read_bytes(),
        "files/config.toml": b"[train]\nsteps = 98",
    }

    class Bucket:
        def __init__(self, url: str):
            self.read_if_there = objects.get

    monkeypatch.setattr(train_fleet, "Bucket", Bucket)
    train = Train(recipe="gpt2-tiny", **length)
    found = train_fleet.describe_finished("gs://b/runs/all", train)
    assert found.startswith("gs://b/runs/all has finished: 100,352 of 100,352 tokens") == is_finished
    objects.clear()
    assert not train_fleet.describe_finished("gs://b/runs/all", train), "it has not begun"


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
    head, small, _ = lines(batches.with_default_batch(read(), TINY)).values()  # v2-8 and v5p-16 have 8 devices each
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
    monkeypatch.setattr(batches, "read_file", lambda *_: None)
    file = read(provider='provider = "google"\nproject = "my-project-123"', before='[setup]\npip = ["tpuswarm"]')
    with pytest.raises(InputError, match=message) if message else nullcontext():
        batches.resolve_batches(file, "gs://b/runs/all", TINY)
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
    file, uploads = fleet_data.place_data(read().model_copy(), "gs://some/runs/all")
    assert uploads == () and file.train and file.train.data == "fake"
    file = fleet_data._with_data(file, data.format(folder=folder))
    file, uploads = fleet_data.place_data(file, "gs://some/runs/all")
    assert file.train and file.train.data
    name = re.sub(r"/data/[0-9a-f]{12}/", "/data/ID/", file.train.data)
    assert name == placed.replace("NAME", folder.parent.name)
    assert len(uploads) == (name != data and "gs://" in name), uploads


def test_other_local_files_that_machines_do_not_get_are_refused(read, folder):
    for line, name in (
        ('init_from = "ignored"', "init_from"),
        ('options = {tokenizer = "hf:../mine"}', "options.tokenizer"),
    ):
        with pytest.raises(InputError, match=rf"^train.{name} is .*, which machines do not get"):
            fleet_data.place_data(read(line), "gs://some/runs/all")
        with pytest.raises(InputError, match=rf"^train.{name} is .*, which machines do not get"):
            fleet_data.place_data(fleet_data._with_data(read(line), "../out.txt"), "gs://some/runs/all")


def test_other_local_files_must_have_the_path_that_machines_have(read, folder):
    assert fleet_data.place_data(read('init_from = "./texts"'), "gs://some/runs/all")[1] == ()
    with pytest.raises(InputError, match=r"^train.init_from is /.*, which machines have elsewhere: write ./texts$"):
        fleet_data.place_data(read(f'init_from = "hf:{folder}/texts"'), "gs://some/runs/all")
