"""Write the text of swarm.toml: of a new fleet, or what an existing file lacks."""

import re
from collections import Counter

from tpuswarm.catalog import find
from tpuswarm.cloud.google.firewall import network_tag
from tpuswarm.config.toml_file import FORMAT
from tpuswarm.errors import InputError
from tpuswarm.fleet.apply.init import GrantText, InitPlan, PoolText, main_region
from tpuswarm.fleet.decide import money
from tpuswarm.fleet.spec.file import Pool, SwarmFile

HEAD_TYPE = "n2-highmem-8"
HEADER = re.compile(r"^[ \t]*(\[\[(?:pool|vm)\]\]|\[head\])[^\n]*\n?", re.MULTILINE)
"""The line that begins a table of machines."""


def swarm_toml(
    plan: InitPlan, provider: str, cross_region: bool, grants: list[GrantText], pools: list[PoolText]
) -> str:
    lines = [f"format = {FORMAT}", f'name = "{plan.name}"', f'provider = "{provider}"', f'project = "{plan.project}"']
    lines += ["allow_cross_region = true"] if cross_region else []
    lines += ["", "[storage]", f'bucket = "{plan.bucket}"', f'region = "{plan.region}"']
    for grant in grants:
        lines += ["", "[[grant]]", f'type = "{grant.type}"', f'zone = "{grant.zone}"', f'how = "{grant.how}"']
        lines += [f"count = {grant.count}", *([f"expires = {grant.expires}"] if grant.expires else [])]
    type_counts = Counter(pool.type for pool in pools)
    machine = [f'network = "{plan.network}"', f'service_account = "{plan.account}"']
    for pool in pools:
        name = pool.type if type_counts[pool.type] == 1 else f"{pool.type}-{pool.how}"
        zones = ", ".join(f'"{zone}"' for zone in pool.zones)
        lines += ["", "[[pool]]", f'name = "{name}"', f'type = "{pool.type}"', f"zones = [{zones}]"]
        lines += [f"count = {pool.count}", f'how = "{pool.how}"', *machine]
    return "\n".join([*lines, "", *_training_lines(plan, pools[0].zones[0], machine)]) + "\n"


def _training_lines(plan: InitPlan, zone: str, machine: list[str]) -> list[str]:
    """Return the tables of a training, as comments."""
    dollars = money.vm_price(HEAD_TYPE, zone, False, 100)
    price = "" if dollars is None else f", ${dollars:,.2f} an hour"
    tables = [
        "[head]", f'type = "{HEAD_TYPE}"', f'zone = "{zone}"', *machine, "",
        "[setup]", 'pip = ["tpuswarm[gcloud,tpu]"]', "",
        "[train]", 'recipe = "gpt2-124m"', f'data = "gs://{plan.bucket}/text"', 'tokens = "10B"',
    ]  # fmt: skip
    intro = [
        "To train one model on all pools, take the # off the tables below, then:",
        f"  tpuswarm train {plan.file}",
        f"The head is a VM that survives preemptions{price}.",
    ]
    return [*(f"# {line}" for line in intro), "#", *(f"# {line}".rstrip() for line in tables)]


def complete(text: str, spec: SwarmFile, project: str, bucket_region: str | None = None) -> str:
    """Return the text of a file with a bucket, and one network and service account for all its machines.

    bucket_region: by default that of most machines. Raises InputError if the file cannot be changed in place.
    """
    tables = [table for _, table, _ in spec.machine_tables]
    hosts = sum(table.count * find(table.type).hosts if isinstance(table, Pool) else 1 for table in tables)
    own = network_tag(spec.name) if hosts > 1 else None  # the default network lets strangers in to a second host
    values = {
        "network": next((table.network for table in tables if table.network != "default"), own),
        "service_account": next((table.service_account for table in tables if table.service_account), None),
    }
    given = {name: value for name, value in values.items() if value}
    if any(name not in table.model_fields_set for table in tables for name in given):
        text = _with_values(text, spec, given)
    if spec.storage is None and spec.pool:
        zones = Counter({zone: pool.count for pool in spec.pool for zone in pool.zones})
        region = bucket_region or main_region(zones)
        text = text.rstrip() + f'\n\n[storage]\nbucket = "{project}-{spec.name}"\nregion = "{region}"\n'
    return text


def _with_values(text: str, spec: SwarmFile, values: dict[str, str]) -> str:
    """Add the values below the header of each table of machines that lacks them."""
    tables = {"[[pool]]": iter(spec.pool), "[[vm]]": iter(spec.vm), "[head]": iter([spec.head] if spec.head else [])}
    if len(HEADER.findall(text)) != len(spec.machine_tables):
        lines = ", ".join(f'{name} = "{value}"' for name, value in values.items())
        raise InputError(f"the file has machines in inline tables: add {lines} to each that lacks it")

    def add(header: re.Match[str]) -> str:
        table = next(tables[header[1]])
        missing = [f'{name} = "{value}"' for name, value in values.items() if name not in table.model_fields_set]
        return "\n".join([header[0].rstrip("\n"), *missing]) + "\n"

    return HEADER.sub(add, text)
