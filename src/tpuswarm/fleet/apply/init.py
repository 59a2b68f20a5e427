"""The steps of `tpuswarm init`: list them, inspect the project, and run them one by one."""

import difflib
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from tpuswarm.catalog import Accelerator, find, usual_slice
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import Denied, NotFound, Taken
from tpuswarm.cloud.google import firewall
from tpuswarm.cloud.google.accounts import Grantee, account_address, create_command
from tpuswarm.cloud.google.project import APIS, BILLING_API
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.money import chips_of, is_generation, quota_key
from tpuswarm.fleet.decide.names import ZONE_PATTERN
from tpuswarm.fleet.spec.file import SwarmFile
from tpuswarm.remote.own_key import find_key, key_file, make_key
from tpuswarm.train.process.atomic import write_atomically

if TYPE_CHECKING:
    from tpuswarm.cloud.google.project import Project

NAME_LABEL = "tpuswarm"
"""Labels what belongs to a fleet of this name before the fleet has an id."""
MAIL_GRANT = re.compile(
    r"(\d+)\s+(on-demand|spot|preemptible)\s+Cloud\s+TPU\s+([\w-]+)\s+(?:chip|device)(?:s|\(s\))?\s+in\s+zone\s+([a-z0-9-]+)",
    re.IGNORECASE,
)
"""A sentence of TRC's mails, of today (chips) and of 2020 (devices), as many who got one quote it."""

FILLERS = ("", "cloud", "tpu", "chip", "chips", "chip(s)", "device", "devices", "device(s)", "in", "zone", "until")


@dataclass(frozen=True)
class GrantText:
    """TPUs that cost nothing, as the user typed them."""

    count: int
    """Of machines, or of chips if the type is a generation."""
    type: str
    zone: str
    how: Literal["spot", "on-demand"]
    expires: date | None


@dataclass(frozen=True)
class PoolText:
    type: str
    zones: tuple[str, ...]
    count: int
    how: str


@dataclass(frozen=True)
class NetworkPlan:
    """A network of the fleet's own, with the rules that connect its machines."""

    name: str
    project: str
    network: str

    @property
    def rules(self) -> tuple[firewall.Rule, firewall.Rule]:
        return firewall.fleet_rules(self.network, firewall.network_tag(self.name), self.description)

    def is_covered(self, rule: firewall.Rule, existing: Iterable[firewall.Rule]) -> bool:
        """Whether existing rules allow as much as this rule."""
        allows = firewall.opens_all_ports if rule.source_tags else firewall.opens_port
        return allows(existing, self.network, [firewall.network_tag(self.name)])

    @property
    def description(self) -> str:
        """Marks resources that cannot have labels."""
        return f"tpuswarm {self.name}"


@dataclass(frozen=True)
class InitPlan(NetworkPlan):
    bucket: str
    region: str
    file: Path
    account: str | None
    """The service account of the machines; None: the project's default one."""
    user: str | None
    """Email address of the credentials in use."""
    bucket_project: str | None = None
    has_head: bool = True
    """Whether a machine of the fleet may become its head, which creates machines."""

    @property
    def resources(self) -> tuple[str, ...]:
        """What the machines work with."""
        return ("bucket", "project", "account") if self.has_head else ("bucket",)

    def grantee(self, default_account: str | None) -> Grantee:
        account = self.account or default_account or "NUMBER-compute@developer.gserviceaccount.com"
        return Grantee(account, self.project, self.bucket)


@dataclass(frozen=True)
class ProjectState:
    apis: frozenset[str] = frozenset()
    billing: str | None = None
    bucket_region: str | None = None
    """Where the bucket lies; None if there is none."""
    network: bool = False
    rules: tuple[firewall.Rule, ...] = ()
    default_account: str | None = None
    account: bool = False
    roles: bool = False
    key: bool = False


class InitStep(NamedTuple):
    id: str
    says: str
    line: str
    """The command that does the same; for the file, its text."""
    there: bool


class GrantMail(NamedTuple):
    """What a mail of TPU Research Cloud says."""

    grants: list[GrantText]
    project: str | None
    days: int | None
    """How long the grants last, from the day of the mail."""


def parse_mail(text: str) -> GrantMail:
    """Parse a whole mail of TPU Research Cloud. Raise InputError if it names no grant."""
    grants = [parse_grant(found[0]) for found in MAIL_GRANT.finditer(text)]
    if not grants:
        raise InputError(
            "the mail names no grant: a line such as `64 spot Cloud TPU v6e chips in zone us-east1-d` is expected"
        )
    project = re.search(r"Cloud project\W+([a-z][a-z0-9-]{4,28}[a-z0-9])\b", text)
    days = re.search(r"\b(\d+)[ -]days?\b", text)
    return GrantMail(grants, project[1] if project else None, int(days[1]) if days else None)


def parse_grant(text: str) -> GrantText:
    """Parse a line of the mail, or `64 v6e us-east1-d spot until 2099-01-31`. Raise InputError."""
    example = "a grant is a line of the mail, or typed like `64 v6e us-east1-d spot until 2099-01-31`"
    found: dict[str, str] = {}
    for word in re.split(r"[\s,]+", text.lower().strip(" \t*-.,")):
        kind = _kind_of_word(word)
        if kind == "unknown" and "type" not in found:
            find(word)  # raises, and names similar types
        if kind == "unknown" or kind in found:
            raise InputError(f"{text!r}: {word!r} has no place in it; {example}")
        if kind:
            found[kind] = word
    if missing := [kind for kind in ("count", "type", "zone") if kind not in found]:
        raise InputError(f"{text!r} lacks the {' and the '.join(missing)}; {example}")
    if int(found["count"]) < 1:
        raise InputError(f"{text!r}: the count is at least 1")
    type_ = found["type"] if is_generation(found["type"]) else find(found["type"]).name
    how: Literal["spot", "on-demand"] = "spot" if found.get("how") in ("spot", "preemptible") else "on-demand"
    expires = date.fromisoformat(found["date"]) if "date" in found else None
    return GrantText(int(found["count"]), type_, found["zone"], how, expires)


def _kind_of_word(word: str) -> str:
    """Return which part of a grant a word is: empty for a word without meaning."""
    if word in FILLERS:
        return ""
    if word in ("spot", "preemptible", "on-demand"):
        return "how"
    if word.isdigit():
        return "count"
    if ZONE_PATTERN.fullmatch(word):
        return "zone"
    with suppress(ValueError):
        date.fromisoformat(word)
        return "date"
    with suppress(InputError):
        return "type" if is_generation(word) or find(word) else "unknown"
    return "unknown"


def list_network_steps(plan: NetworkPlan, has_network: bool, rules: Iterable[firewall.Rule]) -> list[InitStep]:
    """List the steps to a network, including finished ones. `rules`: the project's."""
    network = ["gcloud", "compute", "networks", "create", plan.network, f"--project={plan.project}"]
    network += ["--subnet-mode=auto", f"--description={plan.description}"]
    inside, ssh = plan.rules
    return [
        InitStep("network", f"make the network {plan.network}, closed until a rule below opens it", shlex.join(network),
                 has_network),
        InitStep("inside", "let its machines reach each other on every TCP port", inside.gcloud(plan.project),
                 plan.is_covered(inside, rules)),
        InitStep("ssh", "let SSH reach them from anywhere; only the fleet's keys get in", ssh.gcloud(plan.project),
                 plan.is_covered(ssh, rules)),
    ]  # fmt: skip


def list_listening_steps(file: SwarmFile, project: str, rules: Iterable[firewall.Rule]) -> list[InitStep]:
    """List the step that opens the head's port to members from anywhere, if the file asks for it."""
    if file.head is None or not file.head.listen:
        return []
    rule, tags = firewall.listening_rule(file.name, file.head.network), [firewall.head_tag(file.name)]
    says = f"let everybody reach port {firewall.LISTEN_PORT} of the head, which asks for an invite"
    is_open = firewall.opens_port(rules, file.head.network, tags, firewall.LISTEN_PORT)
    return [InitStep("listen", says, rule.gcloud(project), is_open)]


def list_steps(plan: InitPlan, text: str, state: ProjectState) -> list[InitStep]:
    """List all steps in order, including finished ones. `text`: swarm.toml."""
    project = f"--project={plan.project}"
    apis = [api for api in APIS if api != BILLING_API]
    missing = [api for api in apis if api not in state.apis] or apis
    has_apis = state.apis.issuperset(apis)
    api_names = f"{', '.join(APIS[api] for api in missing)}{'' if has_apis else ', which takes minutes'}"
    bucket = f"gcloud storage buckets create gs://{plan.bucket} {project} --location={plan.region}"
    bucket += " --uniform-bucket-level-access --public-access-prevention --soft-delete-duration=0s"
    grantee = plan.grantee(state.default_account)
    roles = "\n".join(map(grantee.gcloud, grantee.bindings(plan.resources, plan.user)))
    key_path = str(key_file()).replace(str(Path.home()), "~", 1)
    steps = [
        ("billing-api", "turn on Cloud Billing, which says who pays", f"gcloud services enable {BILLING_API} {project}",
         BILLING_API in state.apis),
        ("billing", "see that a billing account is linked", f"gcloud billing projects describe {plan.project}",
         state.billing is not None),
        ("apis", f"turn on {api_names}", shlex.join(["gcloud", "services", "enable", *missing, project]), has_apis),
        ("bucket", f"make the bucket {plan.bucket} in {plan.region}", bucket, state.bucket_region is not None),
        *list_network_steps(plan, state.network, state.rules),
        ("account", f"make the service account {grantee.account}", create_command(grantee.account, plan.project),
         state.account),
        ("roles", "let machines with it use the bucket" + " and create machines" * plan.has_head, roles, state.roles),
        ("key", "make an SSH key for this computer", f"ssh-keygen -t ed25519 -N '' -f {key_path}", state.key),
        ("file", *_file_step(plan.file, text)),
    ]  # fmt: skip
    return [InitStep(*step) for step in steps if plan.account or step[0] != "account"]


def _file_step(path: Path, text: str) -> tuple[str, str, bool]:
    """Return what the step does, the text or the changes of the file, and whether it is done."""
    if not path.exists():
        return f"write {path}", text.rstrip(), False
    before = path.read_text(encoding="utf-8")
    if before == text:
        return f"write {path}", text.rstrip(), True
    changes = difflib.unified_diff(before.splitlines(), text.splitlines(), lineterm="", n=1)
    return f"complete {path}", "\n".join([*changes][2:]), False


def inspect_project(project: "Project", plan: InitPlan) -> ProjectState:
    """Return what exists; without billing, the cloud shows no resources."""
    state = ProjectState(project.apis(), key=find_key() is not None)
    billing = project.billing() if BILLING_API in state.apis else None
    if billing is None:
        return state
    default = project.default_account() if plan.account is None and "compute.googleapis.com" in state.apis else None
    grantee, has_iam = plan.grantee(default), "iam.googleapis.com" in state.apis
    has_account = has_iam and project.accounts.exists(grantee.account)
    has_compute, has_storage = ("compute.googleapis.com" in state.apis), ("storage.googleapis.com" in state.apis)
    bucket = project.find_bucket(plan.bucket, plan.bucket_project) if has_storage else None
    return replace(
        state,
        billing=billing,
        bucket_region=bucket.region if bucket else None,
        network=project.has_network(plan.network) if has_compute else False,
        rules=project.rules() if has_compute else (),
        default_account=default,
        account=has_account,
        roles=has_account and _has_roles(project, plan, grantee),
    )


def _has_roles(project: "Project", plan: InitPlan, grantee: Grantee) -> bool:
    try:
        return not project.accounts.missing(grantee, plan.resources)
    except (Denied, NotFound):  # the user may not act as the account yet, or there is no bucket
        return False


def run_step(
    step: InitStep, project: "Project", plan: InitPlan, state: ProjectState, text: str, report: Callable[[str], None]
) -> None:
    """Run one step. `text`: swarm.toml; `report`: called with progress."""
    if step.id == "billing-api":
        project.turn_on(BILLING_API)
    elif step.id == "billing":
        _require_billing(project)
    elif step.id == "apis":
        missing = [api for api in APIS if api not in state.apis and api != BILLING_API]
        for number, api in enumerate(missing, 1):
            report(f"turning on {APIS[api]} ({number} of {len(missing)})")
            project.turn_on(api)
    elif step.id == "bucket":
        if project.find_bucket(plan.bucket, plan.bucket_project) is None:
            project.make_bucket(plan.bucket, plan.region, {NAME_LABEL: plan.name})
    elif step.id == "account":
        project.accounts.make(plan.grantee(None).account)
    elif step.id == "roles":
        _grant_roles(project, plan, report)
    elif step.id == "key":
        make_key()
    elif step.id == "file":
        write_atomically(plan.file, text)
    else:
        run_network_step(step, project, plan)


def run_network_step(step: InitStep, project: "Project", plan: NetworkPlan) -> None:
    if step.id == "network":
        with suppress(Taken):  # it was invisible before the APIs were on
            project.make_network(plan.network, plan.description)
    else:
        inside, ssh = plan.rules
        rule = inside if step.id == "inside" else ssh
        _make_rule(step, rule, project, lambda rules: plan.is_covered(rule, rules))


def run_listening_step(step: InitStep, project: "Project", file: SwarmFile) -> None:
    assert file.head is not None
    rule, tags = firewall.listening_rule(file.name, file.head.network), [firewall.head_tag(file.name)]
    port = firewall.LISTEN_PORT
    _make_rule(step, rule, project, lambda rules: firewall.opens_port(rules, rule.network, tags, port))


def _make_rule(
    step: InitStep, rule: firewall.Rule, project: "Project", is_covered: Callable[[Iterable[firewall.Rule]], bool]
) -> None:
    try:
        project.make_rule(rule)
    except Taken:
        if not is_covered(project.rules()):
            delete = f"gcloud compute firewall-rules delete {rule.name} --project={project.id}"
            raise Taken(
                f"there is a firewall rule {rule.name}, and it does not {step.says}: delete it with `{delete}`, then "
                "repeat this command, which makes the right one"
            ) from None


def _grant_roles(project: "Project", plan: InitPlan, report: Callable[[str], None]) -> None:
    if plan.user is None:
        raise InputError("cannot tell who you are: name your account with `gcloud config set account YOU@…`")
    default = None if plan.account else project.default_account()
    if not (plan.account or default):
        raise InputError(
            f"project {plan.project} has no default service account: add service_account = "
            f'"{account_address(plan.name, plan.project)}" to every machine of {plan.file}, then repeat this command, '
            "which makes it"
        )
    grantee = plan.grantee(default)
    try:
        project.accounts.grant(grantee, grantee.bindings(plan.resources, plan.user))
    except Denied as error:
        way_out = "let an owner of the project run the commands of this step, then repeat this command"
        raise Denied(f"{error}; or {way_out}") from None
    report("waiting for the roles to take effect, which takes minutes")
    project.accounts.wait_for_roles(grantee, plan.resources)


def _require_billing(project: "Project") -> None:
    if project.billing() is None:
        link = f"gcloud billing projects link {project.id} --billing-account=ACCOUNT"
        raise Denied(
            f"no billing account is linked to project {project.id}, so it cannot have machines, not even free ones: "
            f"`gcloud billing accounts list` names yours, `{link}` links it; then repeat this command"
        )


def main_region(zones: Counter[str]) -> str:
    regions = Counter[str]()
    for zone, count in zones.items():
        regions[region_of(zone)] += count
    return regions.most_common(1)[0][0]


def pools_from_grants(grants: list[GrantText], wanted: Accelerator | None = None) -> list[PoolText]:
    """Return pools of all granted machines, chips as `usual_slice`; or of the wanted type alone, if covered."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for grant in grants:
        tpu = wanted or (usual_slice(grant.type) if is_generation(grant.type) else find(grant.type))
        if quota_key(tpu.name, grant.zone, False) == quota_key(grant.type, grant.zone, False):
            by_zone = counts.setdefault((tpu.name, grant.how), Counter())
            by_zone[grant.zone] += grant.count * chips_of(grant.type) // tpu.chips
    pools = []
    for (type_, how), by_zone in counts.items():
        if zones := tuple(zone for zone, count in by_zone.items() if count):
            pools.append(PoolText(type_, zones, by_zone.total(), how))
    return pools


def plan_from_file(file: SwarmFile, path: Path, project: str, user: str | None) -> InitPlan:
    """Return the plan for an existing file. Raise InputError if it lacks what init sets up."""
    zones = Counter({zone: pool.count for pool in file.pool for zone in pool.zones})
    networks = {pool.network for pool in file.pool}
    if not zones or file.storage is None:
        raise InputError(f"{path} has no [[pool]] to prepare for; add one, or run `tpuswarm init` in another folder")
    if len(networks) > 1:
        raise InputError(f"{path} has pools in {len(networks)} networks, and init sets up one: {', '.join(networks)}")
    accounts = {table.service_account for _, table, _ in file.machine_tables}
    if len(accounts) > 1:
        names = ", ".join(sorted(name or "the default one" for name in accounts))
        raise InputError(f"{path} names {len(accounts)} service accounts, and init sets up one: {names}")
    return InitPlan(
        file.name,
        project,
        networks.pop(),
        file.storage.bucket,
        file.storage.region or main_region(zones),
        path,
        accounts.pop(),
        user,
        file.storage.project,
        file.head is not None,
    )
