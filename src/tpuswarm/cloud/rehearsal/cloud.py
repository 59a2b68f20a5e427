"""The cloud as a whole: its parts, and how they know of each other."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tpuswarm.cloud.rehearsal.common.hosts import Facts, Hosts, RehearsedHost
from tpuswarm.cloud.rehearsal.common.records import Records
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.weather import Weather
from tpuswarm.cloud.rehearsal.compute.instances import Instances
from tpuswarm.cloud.rehearsal.compute.networks import Networks
from tpuswarm.cloud.rehearsal.compute.resources import Resources
from tpuswarm.cloud.rehearsal.tpu.guests import Guests
from tpuswarm.cloud.rehearsal.tpu.nodes import Nodes
from tpuswarm.cloud.rehearsal.tpu.offers import Offers
from tpuswarm.cloud.rehearsal.tpu.operations import Operations
from tpuswarm.cloud.rehearsal.tpu.queue import Queue
from tpuswarm.cloud.rehearsal.tpu.service import Service
from tpuswarm.cloud.rehearsal.web.projects import Projects

Answer = TypeVar("Answer")


class Cloud:
    """Everything that the cloud decides; nothing here touches a machine or a socket."""

    def __init__(self, state: Path, block: int):
        """`state`: its file; `block`: machines get addresses in 127.BLOCK.0.0/16."""
        self.records = Records(state)
        self.timetable = Timetable(self.records)
        self.weather = Weather(self.records)
        self.hosts = Hosts(self.records, block)
        self.operations = Operations(self.records)
        self.offers = Offers(self.weather)
        self.guests = Guests(self.records, self.hosts)
        self.nodes = Nodes(self.records, self.timetable, self.weather, self.hosts, self.offers, self.operations)
        self.queue = Queue(self.records, self.timetable, self.weather, self.nodes, self.operations)
        self.projects = Projects(self.records, self.timetable, self.weather)
        self.resources = Resources(self.records, self.timetable)
        self.instances = Instances(self.resources, self.timetable, self.weather, self.hosts)
        self.networks = Networks(self.resources, self.weather)
        self.nodes.check_network = self.networks.check
        self.tpu = Service(self.projects.check, self.nodes, self.queue, self.offers, self.guests, self.operations)

        self.operations.forget_old()
        self.resources.forget_old()

    def facts(self, host: RehearsedHost) -> Facts | None:
        """What the cloud says of the machine that a host belongs to; None if it is gone."""
        return self.nodes.facts(host) or self.instances.facts(host)

    def answer(self, handler: Callable[..., Answer], *arguments: object) -> Answer:
        """What a handler answers now; what it changed is on the disk when this returns."""
        self.timetable.run_due()
        try:
            return handler(*arguments)
        finally:
            self.records.commit()
