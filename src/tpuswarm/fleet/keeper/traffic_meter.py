"""Read from a run's bucket how many bytes its members have sent and received."""

from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.protocol import Machine, Provider
from tpuswarm.fleet.decide.jobs import all_assignments
from tpuswarm.fleet.decide.traffic import Traffic, add_traffic
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.training import find_run_url, is_head
from tpuswarm.swarm.views import status
from tpuswarm.train.storage.record import read_file

READ_INTERVAL_S = 60.0


class TrafficMeter:
    def __init__(self, provider: Provider):
        self._provider = provider
        self._read_at: float | None = None

    def update(self, document: Document, machines: Iterable[Machine], now: float, steady: float) -> Traffic:
        """Add new traffic to the document's, if the budget limits traffic.

        Members report totals, so a failed reading is made up for by the next one.
        """
        url = find_run_url(document.jobs)
        is_due = self._read_at is None or steady - self._read_at >= READ_INTERVAL_S
        if url is None or document.desired.budget.traffic_per_day is None or not is_due:
            return document.traffic
        self._read_at = steady
        try:
            carried = self._read_bytes(url)
        except (CloudError, ValidationError):
            return document.traffic
        zones = {f"j-{machine.name}": machine.zone for machine in document.desired.own(machines)}
        head = next((each.machine for job, each in all_assignments(document.jobs) if is_head(job)), None)
        head_zone = zones.get(f"j-{head}")
        if head_zone is None:
            return document.traffic
        return add_traffic(document.traffic, url, carried, zones, head_zone, now)

    def _read_bytes(self, url: str) -> Mapping[str, int]:
        bucket_name, _, folder = url.removeprefix("gs://").partition("/")
        bucket = self._provider.bucket(bucket_name)

        def read(name: str) -> bytes | None:
            stored = bucket.read(f"{folder}/{name}")
            return stored.data if stored else None

        data = read_file(read, status.FILE)
        members = () if data is None else status.parse_status(data).members
        return {member.id: member.carried for member in members}
