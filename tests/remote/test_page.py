"""The page of a fleet: its machines, their chips and what their jobs print."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.hosts import free_port
from tests.remote.conftest import ONE, SLICE
from tests.waiting import until
from tests.watch.fake_run import FakeRun

pytestmark = pytest.mark.slow


@contextmanager
def page(fleet) -> Iterator[tuple[str, dict]]:
    command = fleet.start("page", "--port", str(free_port()))
    try:
        url = command.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), command.communicate()
        with urlopen(url.replace("/?", "/stream?"), timeout=120) as stream:
            while stream.readline() != b"event: view\n":
                pass
            yield url, json.loads(stream.readline().decode().removeprefix("data: "))
    finally:
        fleet.interrupt(command)


def read(url: str, what: str) -> str:
    try:
        with urlopen(url.replace("?", f"{what}&" if "?" in what else f"{what}?"), timeout=120) as answer:
            return answer.read().decode()
    except HTTPError as error:
        return error.read().decode()


def test_page_of_a_fleet_has_its_machines_logs_and_metrics(fleet):
    with fleet.job("v2", "speaks", "echo hello from a job; exec sleep 1000"), page(fleet) as (url, view):
        assert view["facts"]["fleet"] and view["facts"]["wanted"] == 2
        machines = view["machines"]
        assert set(machines) == {ONE, SLICE} and machines[ONE][:2] == ["one", "v2-8"]
        assert machines[SLICE][14] == 4, "workers"
        log = until(lambda: "hello from a job" in (log := read(url, f"log?of={ONE}")) and log, 120)
        assert f"── {ONE}/0 speaks\n" in log, "beside other jobs that were there"
        assert read(url, f"log?of={SLICE}") == f"no job is on {SLICE}"
        assert read(url, "log?of=nobody") == "nobody cannot be reached"
        metrics = read(url, "metrics")
        assert 'tpuswarm_pool_machines{pool="slice",state="ready"} 1.0' in metrics
        assert 'tpuswarm_pool_machines_wanted{pool="one"} 1.0' in metrics and "tpuswarm_loss" not in metrics


def test_page_of_a_fleet_that_trains_nothing_has_the_newest_run_here(fleet):
    run = FakeRun(fleet.folder / "runs" / "mine", 3, 10)
    run.grow(2)
    try:
        with page(fleet) as (url, view):
            assert (view["facts"]["run"], view["facts"]["wanted"]) == ("runs/mine", 2)
            assert set(view["members"]) == {"m0", "m1", "m2"} and ONE in view["machines"]
            assert 'run="runs/mine"' in read(url, "metrics")
    finally:
        shutil.rmtree(fleet.folder / "runs")
