"""Train one model over a whole fleet: the jobs to run, and the token that members join with."""

import secrets
import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tpuswarm.config.train_table import Train
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.jobs import Job
from tpuswarm.fleet.spec.file import HEAD, Pool, SwarmFile
from tpuswarm.remote.connect import Connections, fan_out, on_host
from tpuswarm.remote.host import Host
from tpuswarm.remote.paths import STATE_FOLDER
from tpuswarm.train.storage.folders import is_url

TOKEN_FILE = f"{STATE_FOLDER}/swarm-token"
"""The token's file on each machine, relative to the home and readable by its owner only."""
TOKEN_TIMEOUT_S = 10.0
"""A new head does not wait longer for a host that may be going."""
HEAD_PORTS, MEMBER_PORTS = "${TPUSWARM_HEAD_PORTS:-20000-20999}", "${TPUSWARM_MEMBER_PORTS:-21000-21999}"
"""Ray's ports, as a shell expands them; a head and a member may share a machine."""
LISTEN = "${TPUSWARM_LISTEN:-8443}"
"""Where the head admits members from anywhere, as a shell expands it."""
AGGREGATORS = "aggregators-"
"""Prefix of the jobs of VMs for aggregators."""
LISTENS = ", and admits members from anywhere; `tpuswarm invite` on it prints their invites"
ACCEPT_CODE = " --accept-code"
HEAD_ENDS = "; code=$?; [ $code = 130 ] && exit 0; exit $code"
"""Follows the head's command: Ctrl-C and `tpuswarm stop` end the job, SIGTERM ends only the machine."""
WANDB_KEY = "WANDB_API_KEY"
NOT_PASSED = ("recipe", "options", "run", "members", "devices_per_member", "ray_address", "profile")
"""Keys of [train] that the head's command expresses in another way, or not at all."""
SINGLE_PROCESS_OPTIONS = ("keep_best", "overfit_batches", "fast_dev_run", "profile")


class TrainJob(NamedTuple):
    name: str
    where: str
    """A pool; in a pool of TPUs, the head uses only the first host."""
    line: str
    says: str


def run_url(file: SwarmFile) -> str:
    """Return the run's URL. Raise InputError without a bucket."""
    if file.train is not None and file.train.run is not None:
        if not is_url(file.train.run):
            raise InputError(
                f"train.run is {file.train.run}, a folder on one machine, but machines come and go: leave it out, or "
                "use gs://BUCKET/FOLDER"
            )
        return file.train.run
    if file.storage is None:
        raise InputError("the run of a fleet lies in its bucket, and the file has no [storage]: add bucket = …")
    return f"gs://{file.storage.bucket}/runs/{file.name}"


def train_jobs(file: SwarmFile, accept_code: bool = False) -> tuple[TrainJob, ...]:
    """Return the jobs of the head, of each pool's members and of VMs for aggregators.

    Raise InputError for a fleet that cannot train. `accept_code`: the head resumes the run although code or settings
    have changed.
    """
    train = file.train
    assert train is not None
    _check_train(file, train)
    url, head_pool, batches = run_url(file), _head_pool(file), pool_batches(file)
    where = HEAD if head_pool is None else f"the first host of pool {head_pool.name}"
    if batches:
        train = train.model_copy(update={"batch": max(batches.values())})
    line = head_command(train, url, sum(pool.count for pool in file.pool))
    listens = file.head is not None and file.head.listen
    line += f" --listen {LISTEN}" * listens + ACCEPT_CODE * accept_code + HEAD_ENDS
    jobs = [
        TrainJob(
            HEAD, HEAD if head_pool is None else head_pool.name, line, f"the head runs on {where}{LISTENS * listens}"
        )
    ]
    for pool in file.pool:
        line = join_command(url)
        says = f"{pool.count} member{'s' * (pool.count > 1)}, one on each {pool.type} of pool {pool.name}"
        if pool.role == "both":
            line += " --role both"
            says += ", with room for aggregators"
        if batches:
            line += f" --batch {batches[pool.name]}"
            says += f", batch {batches[pool.name]:,}"
        jobs.append(TrainJob(f"members-{pool.name}", pool.name, line, says))
    for vm in file.vm:
        if vm.role == "aggregators":
            line = f"{join_command(url)} --role aggregators"
            jobs.append(TrainJob(f"{AGGREGATORS}{vm.name}", vm.name, line, f"aggregators run on VM {vm.name}"))
    return tuple(jobs)


def join_command(url: str) -> str:
    command = f"exec python -m tpuswarm join {shlex.quote(url)} --of-machine --token-file ~/{TOKEN_FILE}"
    return f"{command} --ports {MEMBER_PORTS}"


def _check_train(file: SwarmFile, train: Train) -> None:
    if not file.pool:
        raise InputError("the file has no [[pool]], so there is nothing to train on")
    if unsupported := [name for name in SINGLE_PROCESS_OPTIONS if getattr(train, name)]:
        raise InputError(f"train.{unsupported[0]} is for a run of one process, not for members: leave it out")
    if train.wandb is not None and (file.setup is None or WANDB_KEY not in file.setup.secrets):
        raise InputError(f'train.wandb needs a key on the head: add secrets = ["{WANDB_KEY}"] to [setup]')
    if file.provider != "google":
        return
    packages = file.setup.without_files().pip if file.setup else ()
    example = 'name it in pip or requirements of [setup], such as pip = ["tpuswarm[gcloud,tpu'
    if not any("tpuswarm" in package for package in packages):
        raise InputError(f'the machines need tpuswarm: {example}]"]')
    if train.wandb is not None and not any("wandb" in package for package in packages):
        raise InputError(f'train.wandb needs the package of W&B on the head: {example},wandb]"]')


def pool_batches(file: SwarmFile) -> dict[str, int]:
    """Return the batch of each pool if [train] has a table of batches. Raise InputError for batches that do not fit.

    Steps count, and rows are leased, in the largest batch, so the others must divide it.
    """
    assert file.train is not None
    batches = file.train.batch
    if not isinstance(batches, dict):
        return {}
    pools = [pool.name for pool in file.pool]
    if unknown := [name for name in batches if name not in pools]:
        raise InputError(f"train.batch names {unknown[0]}, and the pools are {', '.join(pools)}")
    if missing := [name for name in pools if name not in batches]:
        raise InputError(f"train.batch has no number for pool {missing[0]}: name all pools, or give one number")
    largest = max(batches.values())
    if odd := [name for name, batch in batches.items() if largest % batch]:
        raise InputError(
            f"train.batch of {odd[0]} is {batches[odd[0]]}, which does not divide the largest, {largest}: rows are "
            "leased in the largest batch"
        )
    return batches


def _head_pool(file: SwarmFile) -> Pool | None:
    """Return the pool that runs the head; None if the head has its own machine."""
    if file.head is not None:
        return None
    pool = next((pool for pool in file.pool if pool.how in ("on-demand", "reserved")), None)
    if pool is None:
        raise InputError("all pools are spot or queued, so nothing would survive a preemption: add a [head]")
    return pool


def is_same_command(line: str, existing: str) -> bool:
    """Whether an existing job runs this command; whether it accepts changed code makes no difference."""
    return line == existing or line == existing.replace(ACCEPT_CODE, "")


def head_command(train: Train, url: str, members: int) -> str:
    words = [train.recipe]
    for name, value in train.model_dump(exclude_unset=True, exclude=set(NOT_PASSED)).items():
        words += _option(name, value)
    for name, value in train.options.items():
        words += _option(name, value)
    command = f"python -m tpuswarm train {shlex.join(words)} --members 0 --run {shlex.quote(url)}"
    return f"{command} --token-file ~/{TOKEN_FILE} --expect {members} --ports {HEAD_PORTS}"


def _option(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        value = f"[{','.join(map(str, value))}]"
    return [] if value is None else [flag, str(value)]


def find_run_url(jobs: Iterable[Job]) -> str | None:
    """Return the URL of the run whose head is among the jobs."""
    words = next((shlex.split(job.line) for job in jobs if is_head(job)), [])
    return words[words.index("--run") + 1] if "--run" in words else None


def why_ended(jobs: Iterable[Job]) -> str:
    """Return why a training has ended that no keeper starts again: its head failed, or all its members; else empty."""
    jobs = list(jobs)
    failed = [it for job in jobs if is_member(job) for it in job.assignments if it.phase == "failed"]
    has_members = any(not job.is_over for job in jobs if is_member(job))
    heads = [it for job in jobs if is_head(job) for it in job.assignments if it.phase == "failed"]
    return heads[0].why if heads else failed[0].why if failed and not has_members else ""


def is_head(job: Job) -> bool:
    """Whether a job is a training's head, and not a user's job of that name."""
    return job.name == HEAD and TOKEN_FILE in job.line


def is_member(job: Job) -> bool:
    return TOKEN_FILE in job.line and job.name != HEAD and not job.name.startswith(AGGREGATORS)


async def share_token(
    connections: Connections, job: Job, host: Host, jobs: Iterable[Job], hosts: Mapping[tuple[str, int], Host]
) -> None:
    """Give the token to a host on which a job of the training is about to start.

    A head draws a new token and gives it to all hosts; a member's host that did not receive it, or came later, gets
    it from the head. `hosts`: by machine and worker. Raise this host's error.
    """
    if is_head(job):
        token = secrets.token_hex(32)
        await give_token(connections, host, token)
        others = [other for other in hosts.values() if other.label != host.label]
        await fan_out(others, lambda other: give_token(connections, other, token), time_out_s=TOKEN_TIMEOUT_S)
    elif TOKEN_FILE in job.line:
        heads = (assignment.machine for other in jobs if is_head(other) for assignment in other.assignments)
        head_host = hosts.get((next(heads, None) or "", 0))
        if head_host and (token := await read_token(connections, head_host) or ""):
            await give_token(connections, host, token)


async def give_token(connections: Connections, host: Host, token: str) -> None:
    """Write the token through the connection, so that no command line shows it."""
    line = (
        f"umask 077 && mkdir -p ~/{STATE_FOLDER} && cat >~/{TOKEN_FILE}.part && mv ~/{TOKEN_FILE}.part ~/{TOKEN_FILE}"
    )
    connection = await connections.to(host)
    await on_host(host, lambda: connection.run(line, input=token, check=True))


async def read_token(connections: Connections, host: Host) -> str | None:
    connection = await connections.to(host)
    result = await on_host(host, lambda: connection.run(f"cat ~/{TOKEN_FILE}", check=False))
    return str(result.stdout).strip() or None
