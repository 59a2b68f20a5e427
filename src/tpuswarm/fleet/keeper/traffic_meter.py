"""What the members of a fleet's training have carried, as its run says in the bucket."""

from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.protocol import Machine, Provider
from tpuswarm.fleet.decide.traffic import Traffic, add_traffic
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.training import find_run_url, is_head
from tpuswarm.swarm.views import status
from tpuswarm.train.storage.record import read_file

READ_INTERVAL_S = 60.0
"""Seconds between two looks: each is a request."""


class TrafficMeter:
    """Of one keeper."""

    def __init__(self, provider: Provider):
        self._provider = provider
        self._looked: float | None = None
        """When, by the even clock."""

    def look(self, document: Document, machines: Iterable[Machine], now: float, steady: float) -> Traffic:
        """The document's traffic, with what came since, where its budget has a limit for it.

        What the bucket does not say now, it says later: members count all that they have ever carried.
        """
        url = find_run_url(document.jobs)
        limited = document.desired.budget.traffic_per_day is not None
        if url is None or not limited or (self._looked is not None and steady - self._looked < READ_INTERVAL_S):
            return document.traffic
        self._looked = steady
        try:
            carried = self._read(url)
        except (CloudError, ValidationError):  # no answer, or half an answer: the next look asks again
            return document.traffic
        zones = {f"j-{each.name}": each.zone for each in machines if each.fleet == document.desired.fleet}
        head = next((seat.machine for job in document.jobs if is_head(job) for seat in job.assignments), None)
        place = zones.get(f"j-{head}")
        if place is None:
            return document.traffic
        return add_traffic(document.traffic, url, carried, zones, place, now)

    def _read(self, url: str) -> Mapping[str, int]:
        bucket, _, folder = url.removeprefix("gs://").partition("/")
        stored = self._provider.bucket(bucket)

        def read(name: str) -> bytes | None:
            found = stored.read(f"{folder}/{name}")
            return found.data if found else None

        found = read_file(read, status.FILE)
        members = () if found is None else status.parse_status(found).members
        return {each.id: each.carried for each in members}
