"""The number that a worker of a slice thinks it has."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

MEND = (
    "take TPU_WORKER_ID out of the environment (~/.bashrc, /etc/environment, `[setup] env`): the machine knows its own"
)


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


CHECK = Check(
    "worker", "TPU_WORKER_ID, agent-worker-number",
    "workers that have one number twice wait for each other for ever at the start", MEND, probe,
)  # fmt: skip
