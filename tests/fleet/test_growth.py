"""What would grow for ever, and does not."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tpuswarm.fleet.core.actions import Event
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.core.jobs import Job, Seat
from tpuswarm.fleet.core.memory import Memory
from tpuswarm.fleet.keeping import history
from tpuswarm.fleet.keeping.document import KEPT_JOBS, Document, with_job


def job(name: str, run: int, phase: str = "done") -> Job:
    return Job(name, "small", "true", "preempted", (Seat("small", run=run, phase=phase),))  # type: ignore[arg-type]


def test_jobs_that_are_over_are_forgotten_and_their_numbers_of_runs_are_not():
    document = Document("a", "google", "p", Desired("a-1", ()), ())
    document = with_job(document, job("long", 3, "running"))
    for number in range(KEPT_JOBS + 5):
        document = with_job(document, job(f"job-{number}", 40 - number if number < 5 else 1))
    names = [each.name for each in document.jobs]
    assert names[0] == "long" and "job-0" not in names and f"job-{KEPT_JOBS + 4}" in names
    assert len(names) == KEPT_JOBS + 2 and document.last_run == 40
    again = with_job(document, replace(document.jobs[1], line="false"))
    assert len(again.jobs) == len(names), "one in the place of another"


def test_the_oldest_events_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MOST", 10)
    kept = history.History(tmp_path / "history.db")
    for number in range(25):
        kept.keep(Memory(), [Event(float(number), "small", "m", "asked", "why")], float(number))
    assert [each.at for each in kept.events()] == [float(number) for number in range(15, 25)]


def test_the_log_of_a_keeper_is_begun_anew_in_the_same_file(tmp_path):
    log = tmp_path / "keeper.log"
    code = (
        "import sys; from pathlib import Path; from tpuswarm.fleet.keeping.log import shorten\n"
        "for number in range(6):\n"
        "    print('x' * 40); shorten(Path(sys.argv[1]), 100)\n"
    )
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", code, str(log)], stdout=file, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert log.read_text() == "" or log.stat().st_size <= 100
    assert (tmp_path / "keeper.log.1").read_text() == ("x" * 40 + "\n") * 3
    other = tmp_path / "other.log"
    other.write_text("y" * 500)
    subprocess.run([sys.executable, "-c", code, str(other)], stdout=subprocess.DEVNULL)
    assert other.stat().st_size == 500, "what somebody else writes is left alone"


def test_a_full_disk_takes_the_words_of_a_keeper_and_not_the_keeper(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from tpuswarm.cli.runs import make_console; from tpuswarm.cli.watching import Watching\n"
        "watching = Watching(make_console())\n"
        "for number in range(5):\n"
        "    watching.say('x' * 40)\n"
        "Path(sys.argv[1]).write_text('it went on')\n"
    )
    done = tmp_path / "done"
    with Path("/dev/full").open("w") as full:
        subprocess.run([sys.executable, "-c", code, str(done)], stdout=full, stderr=subprocess.DEVNULL)
    assert done.read_text() == "it went on"
