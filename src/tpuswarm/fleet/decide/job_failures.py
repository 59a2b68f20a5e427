"""Find the jobs of a fleet that fail again and again."""

from collections.abc import Iterable
from dataclasses import dataclass

from tpuswarm.fleet.decide.jobs import Assignment, Job, has_same_errors


@dataclass(frozen=True)
class Failure:
    """A job that fails again and again."""

    job: Job
    assignment: Assignment
    """Of its failing assignments, one that is not run again if there is one."""
    count: int

    @property
    def says(self) -> str:
        failed = "has failed" if self.assignment.phase == "failed" else "keeps failing"
        more = f" and on {self.count - 1} more" if self.count > 1 else ""
        return f"job {self.job.name} {failed} on {self.assignment.machine}{more}: {self.assignment.error}"


def find_failures(jobs: Iterable[Job]) -> list[Failure]:
    """Return jobs whose last run failed and that run again, or did until the same error repeated."""
    failures = []
    for job in jobs:
        failing = [it for it in job.assignments if it.error and (it.is_open or has_same_errors(it))]
        if failing:
            failures.append(Failure(job, min(failing, key=lambda it: it.is_open), len(failing)))
    return failures
