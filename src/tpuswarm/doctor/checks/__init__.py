"""All checks, in the order in which they are shown: one file each."""

from tpuswarm.doctor.check import AcrossCheck, Check
from tpuswarm.doctor.checks import (
    apt,
    bad_node,
    clock,
    devices,
    disk,
    files,
    fork,
    head,
    held,
    lock,
    memory,
    notice,
    preload,
    tpu_logs,
    versions,
    worker,
)

CHECKS: tuple[Check, ...] = tuple(
    each.CHECK
    for each in (
        devices,
        held,
        lock,
        bad_node,
        tpu_logs,
        worker,
        head,
        notice,
        disk,
        memory,
        files,
        clock,
        preload,
        apt,
        fork,
    )
)
"""Of one host."""
ACROSS: tuple[AcrossCheck, ...] = (versions.CHECK,)
"""Of several together."""
