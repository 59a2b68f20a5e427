"""All checks, in the order in which they are shown: one file each."""

from tpuswarm.doctor.check import AcrossCheck, Check
from tpuswarm.doctor.checks import (
    apt,
    bad_node,
    bucket,
    clock,
    devices,
    disk,
    files,
    fork,
    head,
    held,
    idle,
    libtpu,
    lock,
    memory,
    notice,
    on_cpu,
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
        on_cpu,
        bad_node,
        tpu_logs,
        worker,
        libtpu,
        head,
        bucket,
        notice,
        disk,
        memory,
        files,
        clock,
        preload,
        apt,
        fork,
        idle,
    )
)
"""Of one host."""
ACROSS: tuple[AcrossCheck, ...] = (versions.CHECK,)
"""Of several together."""
