"""One model over a whole fleet: which job runs where, and what its hosts are told in secret."""

import secrets
import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tpuswarm.config.train_table import Train
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.jobs import Job
from tpuswarm.fleet.spec.file import HEAD, Pool, SwarmFile
from tpuswarm.remote.connect import Connections, on_host
from tpuswarm.remote.fan_out import fan_out
from tpuswarm.remote.host import Host
from tpuswarm.remote.places import OURS
from tpuswarm.train.storage.folders import is_url

TOKEN_FILE = f"{OURS}/swarm-token"
"""Where the secret of all who join lies on a machine, from the home: for its owner alone."""
TOKEN_TIMEOUT_S = 10.0
"""Seconds for a host to take the secret: a new head does not wait for one that is on its way out."""
HEAD_PORTS, MEMBER_PORTS = "${TPUSWARM_HEAD_PORTS:-20000-20999}", "${TPUSWARM_MEMBER_PORTS:-21000-21999}"
"""On which Ray listens, for a shell: a head and a member may share a machine. Those of the local cloud share one
computer, and each is told ports of its own."""
ACCEPT_CODE = " --accept-code"
HEAD_ENDS = "; code=$?; [ $code = 130 ] && exit 0; exit $code"
"""After the head's command: who stops it with Ctrl-C, or `tpuswarm stop`, wants its end; SIGTERM is its machine's."""
WANDB_KEY = "WANDB_API_KEY"
NOT_PASSED = ("recipe", "options", "run", "members", "devices_per_member", "ray_address", "profile")
"""Of [train]: what the head's command says in another way, or not at all."""


SINGLE_PROCESS_OPTIONS = ("keep_best", "overfit_batches", "fast_dev_run", "profile")
"""Of [train]: what only a run without members has."""


class TrainJob(NamedTuple):
    """A job of the training."""

    name: str
    where: str
    """A pool; of a pool of TPUs the head has the first host alone."""
    line: str
    """Of a shell."""
    says: str
    """For people."""


def run_url(file: SwarmFile) -> str:
    """The URL of its run. Raises InputError where there is no bucket for it."""
    if file.train is not None and file.train.run is not None:
        if not is_url(file.train.run):
            raise InputError(
                f"train.run is {file.train.run}, a folder of one machine, and machines come and go: leave it out, or "
                "use gs://BUCKET/FOLDER"
            )
        return file.train.run
    if file.storage is None:
        raise InputError("the run of a fleet lies in its bucket, and the file has no [storage]: add bucket = …")
    return f"gs://{file.storage.bucket}/runs/{file.name}"


def train_jobs(file: SwarmFile, accept_code: bool = False) -> tuple[TrainJob, ...]:
    """The head and, for each pool, its members. Raises InputError for a fleet that cannot train.

    accept_code: the head goes on with a run although code or settings have changed.
    """
    assert file.train is not None
    if not file.pool:
        raise InputError("the file has no [[pool]], so there is nothing that could train")
    if alone := [name for name in SINGLE_PROCESS_OPTIONS if getattr(file.train, name)]:
        raise InputError(f"train.{alone[0]} is for a run of one process, not for members: leave it out")
    if file.train.wandb is not None and (file.setup is None or WANDB_KEY not in file.setup.secrets):
        raise InputError(f'train.wandb needs a key on the head: add secrets = ["{WANDB_KEY}"] to [setup]')
    if file.provider == "google" and not _brings(file, "tpuswarm"):
        raise InputError(
            "[setup] must bring tpuswarm to the machines: name it in pip or requirements, such as "
            'pip = ["tpuswarm[gcloud,tpu]"]'
        )
    if file.provider == "google" and file.train.wandb is not None and not _brings(file, "wandb"):
        raise InputError(
            "train.wandb needs the package of W&B on the head: name it in pip or requirements of [setup], such as "
            'pip = ["tpuswarm[gcloud,tpu,wandb]"]'
        )
    url = run_url(file)
    stays = _head_pool(file)
    on = HEAD if stays is None else f"the first host of pool {stays.name}"
    batches = pool_batches(file)
    train = file.train.model_copy(update={"batch": max(batches.values())}) if batches else file.train
    line = head_command(train, url, sum(each.count for each in file.pool)) + ACCEPT_CODE * accept_code + HEAD_ENDS
    jobs = [TrainJob(HEAD, HEAD if stays is None else stays.name, line, f"the head runs on {on}")]
    for pool in file.pool:
        line = f"exec python -m tpuswarm join {shlex.quote(url)} --of-machine --token-file ~/{TOKEN_FILE}"
        line += f" --ports {MEMBER_PORTS}"
        says = f"{pool.count} member{'s' * (pool.count > 1)}, one on each {pool.type} of pool {pool.name}"
        if batches:
            line += f" --batch {batches[pool.name]}"
            says += f", batch {batches[pool.name]:,}"
        jobs.append(TrainJob(f"members-{pool.name}", pool.name, line, says))
    return tuple(jobs)


def pool_batches(file: SwarmFile) -> dict[str, int]:
    """The batch of each pool, where [train] has a table of them. Raises InputError for one that cannot train together.

    The run's batch, in which steps count and rows are leased, is the largest: the others have to divide it.
    """
    assert file.train is not None
    given = file.train.batch
    if not isinstance(given, dict):
        return {}
    pools = [each.name for each in file.pool]
    if strange := [name for name in given if name not in pools]:
        raise InputError(f"train.batch names {strange[0]}, and the pools are {', '.join(pools)}")
    if missing := [name for name in pools if name not in given]:
        raise InputError(f"train.batch has no number for pool {missing[0]}: it names all pools, or is one number")
    largest = max(given.values())
    if odd := [name for name, each in given.items() if largest % each]:
        raise InputError(
            f"train.batch of {odd[0]} is {given[odd[0]]}, which does not divide the largest, {largest}: rows are "
            "handed out in the largest batch"
        )
    return given


def _head_pool(file: SwarmFile) -> Pool | None:
    """Where the head runs for want of a machine of its own; None: it has one."""
    if file.head is not None:
        return None
    stays = next((each for each in file.pool if each.how in ("on-demand", "reserved")), None)
    if stays is None:
        raise InputError("no machine of the file stays, for all pools can be preempted: add a [head]")
    return stays


def _brings(file: SwarmFile, package: str) -> bool:
    lines = file.setup.whole().pip if file.setup else ()
    return any(package in line for line in lines)


def is_same_command(line: str, there: str) -> bool:
    """Whether a job that is there is the one that is asked for; what it was once let to accept is no difference."""
    return line == there or line == there.replace(ACCEPT_CODE, "")


def head_command(train: Train, url: str, members: int) -> str:
    """The command of the head of so many members."""
    words = [train.recipe]
    for name, value in train.model_dump(exclude_unset=True, exclude=set(NOT_PASSED)).items():
        words += _option(name, value)
    for name, value in train.options.items():
        words += _option(name, value)
    said = (
        f"python -m tpuswarm train {shlex.join(words)} --members 0 --run {shlex.quote(url)} --token-file ~/{TOKEN_FILE}"
    )
    return f"{said} --expect {members} --ports {HEAD_PORTS}"


def find_run_url(jobs: Iterable[Job]) -> str | None:
    """The URL of the run whose head is among the jobs; None: none is."""
    words = next((shlex.split(each.line) for each in jobs if is_head(each)), [])
    return words[words.index("--run") + 1] if "--run" in words else None


def _option(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        value = f"[{','.join(map(str, value))}]"
    return [] if value is None else [flag, str(value)]


def is_head(job: Job) -> bool:
    """Whether a job is the head of a training, and not a program of somebody's that is called so."""
    return job.name == HEAD and TOKEN_FILE in job.line


def is_member(job: Job) -> bool:
    """Whether a job is a training's members of a pool."""
    return TOKEN_FILE in job.line and job.name != HEAD


async def share_token(
    connections: Connections, job: Job, host: Host, jobs: Iterable[Job], hosts: Mapping[tuple[str, int], Host]
) -> None:
    """Give a host on which a job is about to begin what members join with, where the job is one of the training.

    A head that begins draws it anew, for itself and for all that are reached; whoever is not, and whatever machine
    comes later, gets the head's when a job begins there. It passes through connections, and stays on the machines.
    hosts: by machine and worker. Raises what goes wrong with this host.
    """
    if is_head(job):
        secret = secrets.token_hex(32)
        await give_token(connections, host, secret)
        others = [each for each in hosts.values() if each.label != host.label]
        await fan_out(others, lambda each: give_token(connections, each, secret), time_out_s=TOKEN_TIMEOUT_S)
    elif is_member(job):
        head = next((seat.machine for each in jobs if is_head(each) for seat in each.assignments), None)
        if head and (at := hosts.get((head, 0))) and (found := await read_token(connections, at)):
            await give_token(connections, host, found)


async def give_token(connections: Connections, host: Host, secret: str) -> None:
    """Write the secret to a host, through the connection and in no command line."""
    line = f"umask 077 && mkdir -p ~/{OURS} && cat >~/{TOKEN_FILE}.part && mv ~/{TOKEN_FILE}.part ~/{TOKEN_FILE}"
    connection = await connections.to(host)
    await on_host(host, lambda: connection.run(line, input=secret, check=True))


async def read_token(connections: Connections, host: Host) -> str | None:
    """The secret that a host has from before; None: none."""
    connection = await connections.to(host)
    done = await on_host(host, lambda: connection.run(f"cat ~/{TOKEN_FILE}", check=False))
    return str(done.stdout).strip() or None
