"""The steps from nothing to a project that is ready for a fleet: decided here, shown, and done one by one."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from tpuswarm.catalog import find
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import Denied, Taken
from tpuswarm.cloud.google import firewall
from tpuswarm.cloud.google.project import APIS, BILLING_API
from tpuswarm.cloud.keys import key_file, make_key, public_key
from tpuswarm.errors import InputError
from tpuswarm.fleet.spec.file import SwarmFile
from tpuswarm.train.process.atomic import write_atomically

if TYPE_CHECKING:
    from tpuswarm.cloud.google.project import Project

NAME_LABEL = "tpuswarm"
"""A label of what a fleet of some name has from its set-up on, before it has an id."""


@dataclass(frozen=True)
class GrantText:
    """TPUs that cost nothing, as a person types them."""

    count: int
    type: str
    zone: str
    how: Literal["spot", "on-demand"]
    expires: date | None


@dataclass(frozen=True)
class PoolText:
    """Machines that are asked for."""

    type: str
    zones: tuple[str, ...]
    count: int
    how: str


@dataclass(frozen=True)
class InitPlan:
    """What the project is to be made ready for."""

    name: str
    project: str
    network: str
    bucket: str
    region: str
    """Of the bucket: that of most TPUs."""
    file: Path
    bucket_of: str | None = None
    """The project of the bucket, where it is another one."""

    @property
    def rules(self) -> tuple[firewall.Rule, firewall.Rule]:
        """The two firewall rules."""
        return firewall.wanted(self.network, firewall.tag_of(self.name), self.description)

    def does(self, rule: firewall.Rule, there: Iterable[firewall.Rule]) -> bool:
        """Whether rules that are there do what this one is for, whatever they are called."""
        judge = firewall.joins if rule.source_tags else firewall.opens_ssh
        return judge(there, self.network, [firewall.tag_of(self.name)])

    @property
    def description(self) -> str:
        """Of what carries no labels."""
        return f"tpuswarm {self.name}"


@dataclass(frozen=True)
class ProjectState:
    """What is there already."""

    apis: frozenset[str] = frozenset()
    billing: str | None = None
    bucket: str | None = None
    """The region that it lies in."""
    network: bool = False
    rules: tuple[firewall.Rule, ...] = ()
    key: bool = False
    file: bool = False


class InitStep(NamedTuple):
    """One thing that is there afterwards."""

    id: str
    says: str
    line: str
    """The command that does the same; of the file, its text."""
    there: bool


def parse_grant(text: str) -> GrantText:
    """`5 v3-8 europe-west4-a`, `100 v2-8 us-central1-f spot until 2027-01-31`. Raises InputError for anything else."""
    words = text.replace(",", " ").split()
    example = "a grant is typed like `100 v2-8 us-central1-f spot until 2027-01-31`: count, type, zone"
    if len(words) < 3 or not words[0].isdigit() or int(words[0]) < 1:
        raise InputError(f"{text!r}: {example}")
    type_ = find(words[1]).name
    rest = [word.lower() for word in words[3:] if word.lower() != "until"]
    spot = bool(rest) and rest[0] in ("spot", "preemptible", "on-demand") and rest.pop(0) != "on-demand"
    try:
        expires = date.fromisoformat(rest.pop(0)) if rest else None
    except ValueError:
        raise InputError(f"{text!r}: {example}, spot or nothing, until and a date") from None
    if rest:
        raise InputError(f"{text!r}: {rest[0]!r} has no place in it; {example}")
    return GrantText(int(words[0]), type_, words[2], "spot" if spot else "on-demand", expires)


def list_steps(plan: InitPlan, text: str, found: ProjectState) -> list[InitStep]:
    """All of them in their order; those that are done are marked. `text`: the file's."""
    of = f"--project={plan.project}"
    rest = [api for api in APIS if api != BILLING_API]
    missing = [api for api in rest if api not in found.apis] or rest
    ready = found.apis.issuperset(rest)
    inside, ssh = plan.rules
    bucket = f"gcloud storage buckets create gs://{plan.bucket} {of} --location={plan.region}"
    network = ["gcloud", "compute", "networks", "create", plan.network, of, "--subnet-mode=auto"]
    return [
        InitStep(
            "billing-api",
            "turn on Cloud Billing, which says who pays",
            f"gcloud services enable {BILLING_API} {of}",
            BILLING_API in found.apis,
        ),
        InitStep(
            "billing",
            "see that a billing account is linked",
            f"gcloud billing projects describe {plan.project}",
            found.billing is not None,
        ),
        InitStep(
            "apis",
            f"turn on {', '.join(APIS[api] for api in missing)}{'' if ready else ', which takes minutes'}",
            shlex.join(["gcloud", "services", "enable", *missing, of]),
            ready,
        ),
        InitStep(
            "bucket",
            f"make the bucket {plan.bucket} in {plan.region}",
            f"{bucket} --uniform-bucket-level-access --public-access-prevention --soft-delete-duration=0s",
            found.bucket is not None,
        ),
        InitStep(
            "network",
            f"make the network {plan.network}, closed until a rule below opens it",
            shlex.join([*network, f"--description={plan.description}"]),
            found.network,
        ),
        InitStep(
            "inside",
            "let its machines reach each other on every TCP port",
            inside.gcloud(plan.project),
            plan.does(inside, found.rules),
        ),
        InitStep(
            "ssh",
            "let SSH reach them from anywhere; only the fleet's keys get in",
            ssh.gcloud(plan.project),
            plan.does(ssh, found.rules),
        ),
        InitStep(
            "key",
            "make an SSH key for this computer",
            f"ssh-keygen -t ed25519 -N '' -f {_home(key_file())}",
            found.key,
        ),
        InitStep("file", f"write {plan.file}", text.rstrip(), found.file),
    ]


def inspect_project(project: "Project", plan: InitPlan) -> ProjectState:
    """What is there already. Where nobody pays, or it cannot be asked yet who does, no more can be seen."""
    found = ProjectState(project.apis(), key=public_key() is not None, file=plan.file.exists())
    billing = project.billing() if BILLING_API in found.apis else None
    if billing is None:
        return found
    compute = "compute.googleapis.com" in found.apis
    return replace(
        found,
        billing=billing,
        bucket=project.bucket_region(plan.bucket, plan.bucket_of) if "storage.googleapis.com" in found.apis else None,
        network=project.has_network(plan.network) if compute else False,
        rules=project.rules() if compute else (),
    )


def run_step(
    step: InitStep, project: "Project", plan: InitPlan, found: ProjectState, text: str, say: Callable[[str], None]
) -> None:
    """Do one step. `text`: the file's; `say` is told what is waited for."""
    inside, ssh = plan.rules
    if step.id == "billing-api":
        project.turn_on(BILLING_API)
    elif step.id == "billing":
        _need_billing(project)
    elif step.id == "apis":
        missing = [api for api in APIS if api not in found.apis and api != BILLING_API]
        for number, api in enumerate(missing, 1):
            say(f"turning on {APIS[api]} ({number} of {len(missing)})")
            project.turn_on(api)
    elif step.id == "bucket":
        if project.bucket_region(plan.bucket, plan.bucket_of) is None:  # or that of somebody else: Taken
            project.make_bucket(plan.bucket, plan.region, {NAME_LABEL: plan.name})
    elif step.id == "key":
        make_key()
    elif step.id == "file":
        write_atomically(plan.file, text)
    elif step.id == "network":
        with suppress(Taken):  # it could not be seen before the APIs were on
            project.make_network(plan.network, plan.description)
    else:
        rule = inside if step.id == "inside" else ssh
        try:
            project.make_rule(rule)
        except Taken:
            if not plan.does(rule, project.rules()):
                delete = f"gcloud compute firewall-rules delete {rule.name} --project={plan.project}"
                raise Taken(
                    f"there is a firewall rule {rule.name}, and it does not {step.says}: `{delete}` deletes it, and "
                    "the same command makes the right one"
                ) from None


def main_region(zones: Counter[str]) -> str:
    """The region with the most machines, the first one named where several have as many."""
    regions = Counter[str]()
    for zone, count in zones.items():
        regions[region_of(zone)] += count
    return regions.most_common(1)[0][0]


def swarm_toml(
    plan: InitPlan, provider: str, cross_region: bool, grants: list[GrantText], pools: list[PoolText]
) -> str:
    """swarm.toml."""
    lines = [f'name = "{plan.name}"', f'provider = "{provider}"', f'project = "{plan.project}"']
    lines += ["allow_cross_region = true"] if cross_region else []
    lines += ["", "[storage]", f'bucket = "{plan.bucket}"', f'region = "{plan.region}"']
    for grant in grants:
        lines += ["", "[[grant]]", f'type = "{grant.type}"', f'zone = "{grant.zone}"', f'how = "{grant.how}"']
        lines += [f"count = {grant.count}", *([f"expires = {grant.expires}"] if grant.expires else [])]
    names = Counter(pool.type for pool in pools)
    for pool in pools:
        name = pool.type if names[pool.type] == 1 else f"{pool.type}-{pool.how}"
        zones = ", ".join(f'"{zone}"' for zone in pool.zones)
        lines += ["", "[[pool]]", f'name = "{name}"', f'type = "{pool.type}"', f"zones = [{zones}]"]
        lines += [f"count = {pool.count}", f'how = "{pool.how}"', f'network = "{plan.network}"']
    return "\n".join(lines) + "\n"


def pools_from_grants(grants: list[GrantText]) -> list[PoolText]:
    """A pool for each type and kind that is granted, with all of its zones and machines."""
    alike = dict.fromkeys((grant.type, grant.how) for grant in grants)
    found = []
    for type_, how in alike:
        mine = [grant for grant in grants if (grant.type, grant.how) == (type_, how)]
        zones = tuple(dict.fromkeys(grant.zone for grant in mine))
        found.append(PoolText(type_, zones, sum(grant.count for grant in mine), how))
    return found


def plan_from_file(file: SwarmFile, path: Path, project: str) -> InitPlan:
    """What a file that is there already needs. Raises InputError where it leaves out what the set-up is about."""
    zones = Counter({zone: pool.count for pool in file.pool for zone in pool.zones})
    networks = {pool.network for pool in file.pool}
    if not zones or file.storage is None:
        raise InputError(f"{path} has no [[pool]] or no [storage] bucket, so there is nothing to make ready")
    if len(networks) > 1:
        raise InputError(f"{path} has pools in {len(networks)} networks; the set-up is for one: {', '.join(networks)}")
    region = file.storage.region or main_region(zones)
    return InitPlan(file.name, project, networks.pop(), file.storage.bucket, region, path, file.storage.project)


def _need_billing(project: "Project") -> None:
    if project.billing() is None:
        link = f"gcloud billing projects link {project.id} --billing-account=ACCOUNT"
        raise Denied(
            f"no billing account is linked to project {project.id}, so it can have no machines, free ones included: "
            f"`gcloud billing accounts list` names yours, `{link}` links it; then the same command goes on"
        )


def _home(path: Path) -> str:
    return str(path).replace(str(Path.home()), "~", 1)
