"""The number that a worker of a slice thinks it has, and the TPU that it thinks it is."""

from collections.abc import Iterator

from tpuswarm.catalog import find
from tpuswarm.doctor.check import Check, Subject, Wrong
from tpuswarm.errors import InputError

MEND = (
    "take TPU_WORKER_ID out of the environment (~/.bashrc, /etc/environment, `[setup] env`): the machine knows its own"
)

MEND_TYPE = "take TPU_ACCELERATOR_TYPE out of the environment: libtpu lays out the slice by it"


def probe(host: Subject) -> Iterator[Wrong]:
    """The environment and the metadata against the API."""
    if host.worker is None:
        return
    said = {
        "TPU_WORKER_ID": host.facts["worker_id"],
        "its metadata": (host.facts["metadata"] or {}).get("worker"),
    }
    for where, number in said.items():
        if number is not None and number != str(host.worker):
            mend = MEND if where == "TPU_WORKER_ID" else "replace the machine: `tpuswarm down NAME`"
            yield Wrong(f"it is worker {host.worker}, and {where} says {number!r}", mend)
    types = {
        "TPU_ACCELERATOR_TYPE": host.facts["accelerator"],
        "its metadata": (host.facts["metadata"] or {}).get("type"),
    }
    for where, said in types.items():
        if said is not None and host.type is not None and _other(said, host.type):
            mend = MEND_TYPE if where == "TPU_ACCELERATOR_TYPE" else "replace the machine: `tpuswarm down NAME`"
            yield Wrong(f"it is a {host.type}, and {where} says {said!r}", mend)


def _other(said: str, type_: str) -> bool:
    try:
        return find(said).name != find(type_).name
    except InputError:  # what it says is no type at all
        return True


CHECK = Check(
    "worker", "TPU_WORKER_ID, TPU_ACCELERATOR_TYPE, agent-worker-number, accelerator-type",
    "workers that have one number twice, or another topology, wait for each other for ever at the start", MEND, probe,
)  # fmt: skip
