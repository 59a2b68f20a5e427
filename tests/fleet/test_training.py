"""One model over a fleet, as values: its jobs, who gets the secret when, and the picture of machines and members."""

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.fleet.loop import FLEET, ZONE, pool, vm
from tpuswarm.cli.machines import planned as plan_of
from tpuswarm.cloud.protocol import Listing, Machine, Worker
from tpuswarm.errors import InputError
from tpuswarm.fleet import training
from tpuswarm.fleet.core.actions import Event
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.core.jobs import Job, Seat
from tpuswarm.fleet.doing import counted, doings
from tpuswarm.fleet.file import read_swarm
from tpuswarm.fleet.keeping.document import Document, KeeperLease
from tpuswarm.remote.host import Host, Silent
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.views.status import Look, MemberStatus, SwarmStatus
from tpuswarm.watch.state import Machines, State

NOW = 10_000.0
FILE = """\
name = "all"
provider = "rehearsal"

[storage]
bucket = "some"

[head]
type = "n2-highmem-8"
zone = "us-central1-f"

[[pool]]
name = "small"
type = "v2-8"
zones = ["us-central1-f"]
count = 100

[[pool]]
name = "slice"
type = "v5p-16"
zones = ["us-central1-a"]
count = 2

[train]
recipe = "gpt2-tiny"
data = "fake"
steps = 100
"""


def jobs_of(tmp_path: Path, **about) -> dict[str, str]:
    path = tmp_path / "swarm.toml"
    path.write_text(FILE)
    return {each.name: each.line for each in training.planned(read_swarm(path), **about)}


def test_all_jobs_listen_on_ports_of_their_own_and_are_sized_for_all_members(tmp_path):
    found = jobs_of(tmp_path)
    assert list(found) == ["head", "members-small", "members-slice"]
    assert "--expect 102 --ports ${TPUSWARM_HEAD_PORTS:-20000-20999}" in found["head"]
    assert all(found[name].endswith("--ports ${TPUSWARM_MEMBER_PORTS:-21000-21999}") for name in list(found)[1:])


def test_what_only_one_process_can_do_is_refused_before_anything_is_rented(tmp_path):
    path = tmp_path / "swarm.toml"
    for line in ('keep_best = "eval_loss"', "overfit_batches = 1", "fast_dev_run = true", "profile = true"):
        path.write_text(FILE.replace("[train]\n", f"[train]\n{line}\n"))
        with pytest.raises(InputError, match=f"^train.{line.split()[0]} is for a run of one process, not for members"):
            training.planned(read_swarm(path))


def test_the_head_sends_to_wandb_with_a_key_among_the_secrets_and_not_without(tmp_path):
    path = tmp_path / "swarm.toml"

    def lines(setup: str, provider: str = 'provider = "rehearsal"') -> dict[str, str]:
        text = FILE.replace("[train]\n", f'[setup]\n{setup}\n[train]\nwandb = "a project"\n')
        path.write_text(text.replace('provider = "rehearsal"', provider))
        return {each.name: each.line for each in training.planned(read_swarm(path))}

    google = 'provider = "google"\nproject = "my-project-123"'
    key = 'secrets = ["WANDB_API_KEY"]'
    for setup in ("", 'secrets = ["OTHER"]'):
        with pytest.raises(
            InputError, match=r'^train.wandb needs a key on the head: add secrets = \["WANDB_API_KEY"\]'
        ):
            lines(setup)
    with pytest.raises(InputError, match=r"^train.wandb needs the package of W&B on the head"):
        lines(f'{key}\npip = ["tpuswarm[gcloud,tpu]"]', google)
    for found in (lines(key), lines(f'{key}\npip = ["tpuswarm[gcloud,tpu,wandb]"]', google)):
        assert "--wandb 'a project'" in found["head"]
        assert not any("wandb" in line for name, line in found.items() if name != "head")


def test_a_head_that_was_let_accept_other_code_is_the_same_job(tmp_path):
    usual, accepts = jobs_of(tmp_path)["head"], jobs_of(tmp_path, accept_code=True)["head"]
    assert "--accept-code" in accepts and "--accept-code" not in usual
    assert training.is_same(usual, accepts) and not training.is_same(accepts, usual)
    assert not training.is_same(usual.replace("--steps 100", "--steps 200"), accepts)


def host(name: str) -> Host:
    return Host(f"{name}/0", "127.0.0.1", 22, "me", name, (), Path("known"))


@pytest.fixture
def machines(monkeypatch):
    """The secrets that machines have, by label; one that is None does not take any."""
    held: dict[str, str | None] = {}

    async def give(connections, to, secret):
        if to.label in held and held[to.label] is None:
            raise Silent(to, 1.0, "was not done")
        held[to.label] = secret

    async def find(connections, at):
        return held.get(at.label)

    monkeypatch.setattr(training, "give_token", give)
    monkeypatch.setattr(training, "find_token", find)
    return held


def swarm(head: str | None) -> list[Job]:
    line = f"python -m tpuswarm train --token-file ~/{training.TOKEN}"
    seat = Seat("head", head, phase="running")
    return [
        Job("head", "head", line, "always", (seat,)),
        Job("members-small", "small", line, "always", (Seat("small", "a", phase="running"),)),
        Job("mine", "small", "python mine.py", "always", (Seat("small", "a"),)),
    ]


def test_a_new_head_draws_a_new_secret_and_later_machines_get_the_head_s(machines):
    hosts = {(name, 0): host(name) for name in ("first", "a", "b")}
    head, members, mine = swarm("first")

    def begins(job: Job, on: str, jobs: list[Job], reached=hosts) -> None:
        asyncio.run(training.share_secret(None, job, hosts[on, 0], jobs, reached))  # type: ignore[arg-type]

    begins(mine, "a", [head])
    assert machines == {}
    machines["b/0"] = None
    begins(head, "first", [head])
    first = machines["first/0"]
    assert first and machines["a/0"] == first and machines["b/0"] is None, "one that is silent holds nobody up"

    machines["b/0"] = "old"
    begins(members, "b", [head, members])
    assert machines["b/0"] == first

    hosts["second", 0] = host("second")
    begins(head, "second", swarm("second"))
    assert machines["second/0"] != first and machines["a/0"] == machines["b/0"] == machines["second/0"]

    before = dict(machines)
    begins(members, "a", swarm("third"))
    assert machines == before, "a head that nobody reaches: what is there may be right"
    machines["second/0"] = None
    with pytest.raises(Silent):
        begins(head, "second", swarm("second"))


def machine(name: str, of: str = "small", state="ready") -> Machine:
    labels = {"tpuswarm-fleet": FLEET, "tpuswarm-pool": of}
    said = state.upper()
    return Machine(
        name, ZONE, "tpu", "v2-8", state, said, how="spot", created=NOW - 600, workers=(Worker("10.0.0.1", None),),
        labels=labels,
    )  # fmt: skip


def member(name: str, state="alive", speed: float | None = 41_000.0) -> MemberStatus:
    return MemberStatus(f"j-{name}", state, 7, "abc", 12, 1000, speed, 2.5, 1.0, 0)


def picture() -> tuple[Document, Listing, list[Event], list[MemberStatus]]:
    pools = (pool("small", 6), vm("head"))
    line = f"python -m tpuswarm --token-file ~/{training.TOKEN}"
    seats = (
        Seat("small", "s-0", phase="running", run=1),
        Seat("small", "s-1", phase="running", run=2, lost=1),
        Seat("small", "s-2", phase="waiting", why="s-2 is being set up"),
        Seat("small", "s-3", phase="running", run=1),
    )
    jobs = (
        Job("head", "head", line, "always", (Seat("head", "all-head", phase="running", run=1),)),
        Job("members-small", "small", line, "always", seats),
    )
    desired = Desired(FLEET, pools)
    lease = KeeperLease("x", "all-head", 1, 1, NOW)
    document = Document("all", "google", "project", desired, (ZONE,), lease=lease, jobs=jobs)
    there = [machine(f"s-{number}") for number in range(4)] + [machine("s-4", state="creating")]
    events = [
        Event(NOW - 900, "small", "s-5", "ready", "it is ready"),
        Event(NOW - 750, "small", "s-5", "preempted", "the cloud took it away"),
        Event(NOW - 720, "small", "s-5", "refused", f"{ZONE}: There is no more capacity"),
        Event(NOW - 20, "small", "s-5", "refused", f"{ZONE}: There is no more capacity"),
        Event(NOW - 30, "small", "s-4", "creating", "the cloud calls it CREATING"),
    ]
    members = [member("s-0"), member("s-1"), member("s-3", "joining", None), member("far")]
    return document, Listing((*there, machine("all-head", "head")), frozenset()), events, members


def test_machines_jobs_and_members_are_one_picture():
    document, listing, events, members = picture()
    found = {each.machine or each.pool: each for each in doings(document, listing, events, members, NOW)}
    assert {name: (each.kind, each.why) for name, each in found.items()} == {
        "small": (
            "missing",
            f"1 v2-8 not there: s-5 was preempted 12 min ago; waiting since 12 min: {ZONE}: There is no more capacity",
        ),
        "s-4": ("not ready", "creating since 30 s"),
        "s-2": ("not ready", "s-2 is being set up"),
        "s-3": ("joining", "joining"),
        "all-head": ("head", "the head, and keeps the fleet"),
        "j-far": ("other", "alive, on a machine of another's"),
        "s-0": ("training", "training"),
        "s-1": ("training", "training, preempted before"),
    }
    without = {each.machine: each for each in doings(document, listing, events, None, NOW)}
    assert (without["s-0"].kind, without["s-0"].why) == ("joining", "waiting for the head")
    assert counted(list(found.values())) == "2 training, 1 other, 1 joining, 2 not ready, 1 missing"


@pytest.mark.parametrize("height", [24, None])
def test_the_picture_fits_a_terminal_and_says_what_is_left(height):
    document, listing, events, members = picture()
    status = SwarmStatus(
        NOW, NOW - 60, 12, 1, "open", 10_000, Tokens(6_000, 5_000, 0, 1_000, 0), 1.0, 82_000.0, 0, 7_200.0, 2.5, 2.6,
        10, tuple(members), (), "", {}, carried=3 * 2**30,
    )  # fmt: skip
    look = Look("gs://b/runs/all", "gpt2-tiny", "running", 1, "", 100, 100, "tokens", status)
    screen = Console(width=80, height=height or 60, file=io.StringIO())
    screen.print(State("gs://b/runs/all", look, Machines(document, listing, events), NOW).draw(80, height))
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    text = "\n".join(lines)
    assert all(len(line) <= 80 for line in lines) and (height is None or len(lines) <= height), text
    assert ("41,000" in text) == (height is None), "what is well is left out first"
    assert "no more capacity" in " ".join(text.split()) and "2.0 hours left" in text, text
    assert "3.00 GiB carried" in " ".join(text.split())


def test_a_run_that_has_not_begun_has_machines_already():
    document, listing, events, _ = picture()
    seen = State("gs://b/runs/all", None, Machines(document, listing, events), NOW)
    screen = Console(width=120, file=io.StringIO())
    screen.print(seen.draw(120))
    assert "gs://b/runs/all has not begun" in screen.file.getvalue()  # type: ignore[attr-defined]
    found = seen.json()
    assert (found["state"], len(found["machines"])) == ("not begun", 7)


def test_a_wrong_range_of_ports_is_refused():
    from tpuswarm.swarm.engines.ports import Ports, parse_ports

    assert parse_ports("20000-20999") == Ports(20000, 20999) and parse_ports(None) is None
    for wrong in ("20000", "20999-20000", "20000-20010", "80-2000", "65000-65540", "a-b"):
        with pytest.raises(InputError, match="--ports is FIRST-LAST such as 20000-20999"):
            parse_ports(wrong)


def test_auto_gives_each_pool_the_largest_batch_that_goes_with_the_others(capsys):
    from tpuswarm.cli.auto_batch import batches_of

    assert batches_of({"a": 416}, {"a": 8}) == {"a": 416}
    assert batches_of({"a": 416, "b": 768}, {"a": 8, "b": 8}) == {"a": 384, "b": 768}
    assert "a 384 (fits 416), b 768 (fits 768)" in capsys.readouterr().out
    assert batches_of({"a": 416, "b": 3_000}, {"a": 8, "b": 256}) == {"a": 352, "b": 2_816}
    with pytest.raises(InputError, match=r"no batches go together: .*a 100 on 8 devices, b 200 on 256 devices"):
        batches_of({"a": 100, "b": 200}, {"a": 8, "b": 256})


def test_auto_is_answered_once_for_a_run(tmp_path, monkeypatch):
    from tpuswarm.cli import auto_batch
    from tpuswarm.train.bucket import stored

    held: dict[str, bytes] = {}

    class Bucket:
        def __init__(self, url: str):
            self.exists, self.read = held.__contains__, held.__getitem__

        def create(self, name: str, data: bytes) -> bool:
            return held.setdefault(name, data) is data

    asked: list[dict[str, int]] = []

    def largest(file, train) -> dict[str, int]:
        asked.append({"small": 416, "slice": 832})
        return asked[-1]

    monkeypatch.setattr(stored, "Bucket", Bucket)
    monkeypatch.setattr(auto_batch, "_largest", largest)
    path = tmp_path / "swarm.toml"
    path.write_text(FILE.replace("steps = 100", 'steps = 100\nbatch = "auto"'))

    def lines() -> list[str]:
        return [each.line for each in training.planned(auto_batch.with_batch(read_swarm(path), "gs://b/runs/all"))]

    first = lines()
    assert "--batch 832 " in first[0] and first[1].endswith("--batch 416") and first[2].endswith("--batch 832")
    held["files/config.toml"] = b""
    assert lines() == first and len(asked) == 1, "the command once more changes no job"
    path.write_text(path.read_text().replace('name = "small"', 'name = "other"'))
    with pytest.raises(InputError, match="begun with batches for the pools small, slice, and the file has other, sl"):
        lines()
    del held["batches.json"]
    assert not any("--batch" in line for line in lines()), "a run that began with a number goes on with it"


def test_each_pool_has_the_batch_that_its_file_says(tmp_path):
    path = tmp_path / "swarm.toml"

    def jobs(batch: str) -> list[training.Planned]:
        path.write_text(FILE.replace("steps = 100", f"steps = 100\nbatch = {batch}"))
        return list(training.planned(read_swarm(path)))

    head, small, slices = jobs("{small = 16, slice = 64}")
    assert "--batch 64 " in head.line and small.line.endswith("--batch 16") and slices.line.endswith("--batch 64")
    assert plan_of(path)[1].batches == {"v2-8": 16, "v5p-16": 64}, "each is planned with its own"
    assert small.says == "100 members, one on each v2-8 of pool small, batch 16"
    assert "--batch 64 " in jobs("64")[0].line and "--batch" not in jobs("64")[1].line
    for wrong, why in (
        ("{small = 16}", "train.batch has no number for pool slice"),
        ("{small = 16, slice = 64, big = 8}", "train.batch names big, and the pools are small, slice"),
        ("{small = 24, slice = 64}", "batch of small is 24, which does not divide the largest, 64"),
        ("{small = 0, slice = 64}", "batch"),
    ):
        with pytest.raises(InputError, match=why):
            jobs(wrong)
