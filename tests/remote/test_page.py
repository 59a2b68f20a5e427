"""The page of a fleet: its machines, their chips and what their jobs print, from machines of a local cloud."""

import json
import shutil
import time
from urllib.error import HTTPError
from urllib.request import urlopen

from tests.watch.conftest import free_port
from tests.watch.made import MadeRun


def told(stream) -> tuple[str, dict]:
    """The next view or update."""
    kind = ""
    while True:
        line = stream.readline().decode()
        if line.startswith("event: "):
            kind = line[7:].strip()
        elif line.startswith("data: ") and kind in ("view", "update"):
            return kind, json.loads(line[6:])


def test_machines_chips_and_logs(fleet):
    fleet.run("exec", "v2", "--detach", "--name", "speaks", "--", "echo hello from a job; exec sleep 1000")
    command = fleet.start("page", "--port", str(free_port()))
    try:
        url = command.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), command.communicate()
        with urlopen(url.replace("/?", "/stream?"), timeout=120) as stream:
            kind, view = told(stream)
            assert kind == "view" and view["facts"]["fleet"] and view["facts"]["wanted"] == 2
            machines = view["machines"]
            assert set(machines) == {"v2-usc1f-0", "v5e-usc1a-0"} and machines["v2-usc1f-0"][:2] == ["one", "v2-8"]
            assert machines["v5e-usc1a-0"][14] == 4, "workers"
            end = time.monotonic() + 120
            while "hello from a job" not in (said := ask(url, "log?of=v2-usc1f-0")):
                assert time.monotonic() < end, said
                time.sleep(0.5)
            assert "── v2-usc1f-0/0 speaks\n" in said, "beside other jobs that were there"
            assert ask(url, "log?of=v5e-usc1a-0") == "no job is on v5e-usc1a-0"
            assert ask(url, "log?of=nobody") == "nobody cannot be reached"
        metrics = ask(url, "metrics")
        assert 'tpuswarm_pool_machines{pool="slice",state="ready"} 1.0' in metrics
        assert 'tpuswarm_pool_machines_wanted{pool="one"} 1.0' in metrics and "tpuswarm_loss" not in metrics
    finally:
        command.send_signal(2)
        _, err = command.communicate(timeout=60)
        fleet.run("stop", "speaks")
    assert command.returncode == 130 and "Traceback" not in err


def test_a_fleet_that_trains_nothing_comes_with_the_newest_run_here(fleet):
    run = MadeRun(fleet.folder / "runs" / "mine", 3, 10)
    run.grow(2)
    command = fleet.start("page", "--port", str(free_port()))
    try:
        url = command.stdout.readline().strip()
        with urlopen(url.replace("/?", "/stream?"), timeout=120) as stream:
            _, view = told(stream)
        assert (view["facts"]["run"], view["facts"]["wanted"]) == ("runs/mine", 2)
        assert set(view["members"]) == {"m0", "m1", "m2"} and "v2-usc1f-0" in view["machines"]
        assert 'run="runs/mine"' in ask(url, "metrics")
    finally:
        command.send_signal(2)
        command.communicate(timeout=60)
        shutil.rmtree(fleet.folder / "runs")


def ask(url: str, what: str) -> str:
    base, _, token = url.partition("?")
    mark = "&" if "?" in what else "?"
    try:
        with urlopen(f"{base}{what}{mark}{token}", timeout=120) as answer:
            return answer.read().decode()
    except HTTPError as error:
        return error.read().decode()
