"""Decide which run ends and restarts with new flags."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpuswarm.fleet.decide.jobs import Job, all_assignments

FLAG_RESTART_INTERVAL_S = 60.0


def restart_for_flags(jobs: Sequence[Job], flags: Mapping[str, Mapping[str, str]], now: float) -> tuple[Job, ...]:
    """Let one run end and restart with its machine's new flags: one at a time, FLAG_RESTART_INTERVAL_S apart.

    `flags`: by job and machine, only for jobs that tolerate a restart.
    """
    assignments = [assignment for job, assignment in all_assignments(jobs) if job.name in flags]
    last = max((assignment.renewed_at for assignment in assignments), default=0)
    in_progress = any(assignment.renewing and assignment.phase == "running" for assignment in assignments)
    if in_progress or 0 <= now - last < FLAG_RESTART_INTERVAL_S:
        return tuple(jobs)
    for number, job in enumerate(jobs):
        for index, assignment in enumerate(job.assignments):
            if job.name not in flags or assignment.phase != "running" or job.stop:
                continue
            if flags[job.name].get(assignment.machine or "", assignment.flags) != assignment.flags:
                changed = list(job.assignments)
                changed[index] = replace(assignment, renewing=True)
                return (*jobs[:number], replace(job, assignments=tuple(changed)), *jobs[number + 1 :])
    return tuple(jobs)
