"""Compare a report with the assumptions of catalog/data/assumptions.toml (docs/assumptions.md)."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tpuswarm.catalog import Accelerator, find
from tpuswarm.cloud.google.failures import REGION_LIMIT, ZONE_LACKS_TYPE
from tpuswarm.errors import InputError

Facts = Mapping[str, Any]
"""The output of `survey.py` for one host, with `host`, its label, and `number` and `type` as the cloud lists them."""
OLD_DEVICES = ("v2", "v3", "v4")
MEMORY_TOLERANCE = 0.1
HBM_TOLERANCE = 0.01


class Verdict(NamedTuple):
    """Whether an assumption holds, and what was seen."""

    holds: bool
    seen: str


def judge_assumptions(hosts: Iterable[Facts], refusals: Sequence[str]) -> dict[str, Verdict]:
    """Return a verdict for each assumption that the report shows something about; one contradiction decides.

    refusals: the cloud's messages, each with its code in brackets at the end.
    """
    verdicts: dict[str, Verdict] = {}

    def add(assumption: str, verdict: Verdict | None, subject: str) -> None:
        if verdict is not None and (assumption not in verdicts or (verdicts[assumption].holds and not verdict.holds)):
            verdicts[assumption] = verdict._replace(seen=f"{subject}: {verdict.seen}")

    for host in hosts:
        for assumption, check in HOST_CHECKS.items():
            try:
                add(assumption, check(host), host["host"])
            except KeyError as missing:
                if missing.args[0] not in host["lost"]:
                    raise
    for refusal in refusals:
        for assumption, (phrase, codes) in REFUSALS.items():
            if phrase.search(refusal):
                code = refusal.rpartition("(")[2].rstrip(")")
                add(assumption, Verdict(code in codes, code), "refused")
    return verdicts


def _accelerator(host: Facts) -> Accelerator | None:
    try:
        return find(host["type"] or "")
    except InputError:
        return None


def _is_tpu(host: Facts) -> bool:
    return host["jax"].get("platform") == "tpu"


def _compare(seen: object, expected: object) -> Verdict:
    return Verdict(seen == expected, f"{seen}, expected {expected}" if seen != expected else str(seen))


def _metadata(name: str, is_expected: Callable[[str], bool] = bool) -> Callable[[Facts], Verdict | None]:
    def check(host: Facts) -> Verdict | None:
        metadata = host["metadata"]
        return None if metadata is None else Verdict(is_expected(metadata[name] or ""), str(metadata[name]))

    return check


def _worker_number(host: Facts) -> Verdict | None:
    metadata = host["metadata"]
    return None if host["number"] is None or metadata is None else _compare(metadata["worker"], str(host["number"]))


def _endpoints(host: Facts) -> Verdict | None:
    accelerator, endpoints = _accelerator(host), host["endpoints"]
    if accelerator is None or not endpoints:
        return None
    holds = len(endpoints) == accelerator.hosts and all(re.fullmatch(r"(.*:)?IP", each) for each in endpoints)
    return Verdict(holds, ",".join(endpoints[:4]))


def _type(host: Facts) -> Verdict | None:
    metadata, accelerator = host["metadata"], _accelerator(host)
    if metadata is None or accelerator is None or accelerator.api_name is None:
        return None
    return _compare(metadata["type"], accelerator.api_name)


def _instance_id(host: Facts) -> Verdict | None:
    keys = host["metadata_keys"]
    return None if keys is None else Verdict("attributes/instance-id" in keys, f"{len(keys)} keys")


def _product(host: Facts) -> Verdict | None:
    is_google = host["metadata"] is not None and not host["is_rehearsed"]
    return Verdict("Google" in host["product"], host["product"]) if is_google else None


def _device_names(host: Facts) -> Verdict | None:
    accelerator, devices = _accelerator(host), host["devices"]
    if accelerator is None or not devices:
        return None
    folder = "/dev/accel" if accelerator.generation.name in OLD_DEVICES else "/dev/vfio/"
    return Verdict(all(device.startswith(folder) for device in devices), ", ".join(devices))


def _chips(host: Facts) -> Verdict | None:
    accelerator = _accelerator(host)
    if accelerator is None:
        return None
    chips = {pci[0].rpartition(".")[0] if pci else device for device, pci in host["pci"].items()}
    return _compare(len(chips), accelerator.chips_per_host)


def _two_files(host: Facts) -> Verdict | None:
    accelerator = _accelerator(host)
    if accelerator is None or accelerator.generation.name != "tpu7x":
        return None
    return _compare(len(host["devices"]), 2 * accelerator.chips_per_host)


def _jax_devices(host: Facts) -> Verdict | None:
    accelerator, kinds = _accelerator(host), host["jax"].get("kinds")
    if accelerator is None or kinds is None:
        return None
    return _compare(len(kinds), accelerator.chips_per_host * accelerator.generation.devices_per_chip)


def _device_kind(host: Facts) -> Verdict | None:
    accelerator = _accelerator(host)
    if accelerator is None or not _is_tpu(host):
        return None
    kinds = set(host["jax"]["kinds"])
    return Verdict(kinds <= set(accelerator.generation.device_kinds), ", ".join(sorted(kinds)))


def _hbm(host: Facts) -> Verdict | None:
    accelerator = _accelerator(host)
    if accelerator is None or not _is_tpu(host) or None in host["jax"]["memory"]:
        return None
    expected, sizes = accelerator.generation.compiler_hbm_bytes, host["jax"]["memory"]
    holds = all(abs(size / expected - 1) < HBM_TOLERANCE for size in sizes)
    return Verdict(holds, f"{min(sizes):,} bytes, expected {expected:,}")


def _host_size(host: Facts) -> Verdict | None:
    accelerator = _accelerator(host)
    size = accelerator and accelerator.host
    if host["is_rehearsed"] or not size or size.memory_gb is None:
        return None
    memory_gb = host["memory"]["MemTotal"] / 1e9
    holds = abs(memory_gb / size.memory_gb - 1) < MEMORY_TOLERANCE and size.vcpus in (None, host["cpus"])
    return Verdict(holds, f"{host['cpus']} vCPUs, {memory_gb:.0f} GB, expected {size.vcpus} and {size.memory_gb:g}")


def _process_index(host: Facts) -> Verdict | None:
    """Equal numbers of one host show nothing."""
    worker, process = (host["metadata"] or {}).get("worker"), host["jax"].get("process")
    is_other = host["jax"].get("processes", 1) > 1 and worker is not None and int(worker) != process
    return Verdict(True, f"worker {worker} is JAX's process {process}") if is_other else None


def _lock(host: Facts) -> Verdict | None:
    if not _is_tpu(host):
        return None
    lock = host["jax"]["lock"]
    return Verdict(lock["is_locked"], "locked" if lock["is_locked"] else "no lock" if lock["file"] else "no file")


def _exclusive(host: Facts) -> Verdict | None:
    second = host["jax"].get("second")
    if second is None or not _is_tpu(host):
        return None
    return Verdict(
        re.search("in use|busy", second.get("error", "")) is not None, second.get("error", "a second process started")
    )


def _metrics(host: Facts) -> Verdict | None:
    if not _is_tpu(host):
        return None
    error = host["jax"]["metrics_error"]
    return Verdict(not error, error or "it listens")


def _preload(host: Facts) -> Verdict | None:
    if not host["devices"]:
        return None
    return Verdict(any("tcmalloc" in library for library in host["preload"]), ", ".join(host["preload"]) or "none")


def _image(host: Facts) -> Verdict | None:
    if host["is_rehearsed"] or not host["devices"]:
        return None
    name, python = host["system"]["name"], host["system"]["python"]
    return Verdict(name.startswith("Ubuntu 22.04") and python.startswith("3.10."), f"{name}, Python {python}")


HOST_CHECKS: dict[str, Callable[[Facts], Verdict | None]] = {
    "worker-number": _worker_number, "worker-endpoints": _endpoints, "accelerator-type": _type,
    "instance-id": _instance_id, "preempted": _metadata("preempted", lambda value: value in ("TRUE", "FALSE")),
    "maintenance-event": _metadata("maintenance"), "scopes": _metadata("scopes", lambda value: "/auth/" in value),
    "product-name": _product, "device-files": _device_names, "chips-per-host": _chips, "tpu7x-files": _two_files,
    "jax-devices": _jax_devices, "device-kind": _device_kind, "hbm": _hbm, "host-size": _host_size,
    "process-index": _process_index, "lock-file": _lock, "one-process": _exclusive, "metrics-port": _metrics,
    "preload": _preload, "image": _image,
}  # fmt: skip
"""By the id of the assumption; None: this host shows nothing about it."""
REFUSALS = {
    "no-capacity": (re.compile("no more capacity in the zone"), ("RESOURCE_EXHAUSTED",)),
    "zone-quota": (re.compile(r"Quota (limit )?'\w+ForTPUAPI'"), ("RESOURCE_EXHAUSTED",)),
    "region-quota": (REGION_LIMIT, ("RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "INTERNAL")),
    "zone-lacks-type": (ZONE_LACKS_TYPE, ("INVALID_ARGUMENT",)),
    "hidden-zone": (re.compile("Permission denied on 'locations/"), ("PERMISSION_DENIED",)),
}
"""Phrases of the cloud's refusals and their codes."""
