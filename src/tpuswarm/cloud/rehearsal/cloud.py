"""The cloud as a whole: its parts and how they are connected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpuswarm.cloud.rehearsal.common.hosts import Facts, Hosts, RehearsedHost
from tpuswarm.cloud.rehearsal.common.policies import Policies
from tpuswarm.cloud.rehearsal.common.records import Records
from tpuswarm.cloud.rehearsal.common.region_quotas import RegionQuotas
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.zone_faults import ZoneFaults
from tpuswarm.cloud.rehearsal.compute.groups import Groups
from tpuswarm.cloud.rehearsal.compute.instances import Instances
from tpuswarm.cloud.rehearsal.compute.networks import Networks
from tpuswarm.cloud.rehearsal.compute.resources import Resources
from tpuswarm.cloud.rehearsal.projects import Projects
from tpuswarm.cloud.rehearsal.tpu.guests import GuestAttributes
from tpuswarm.cloud.rehearsal.tpu.nodes import Nodes
from tpuswarm.cloud.rehearsal.tpu.offers import Offers
from tpuswarm.cloud.rehearsal.tpu.operations import Operations
from tpuswarm.cloud.rehearsal.tpu.queue import Queue
from tpuswarm.cloud.rehearsal.tpu.service import TpuService


class Cloud:
    """Everything that the cloud decides; touches no machine and no socket."""

    def __init__(self, state: Path, network: str):
        """Load the state file. `network`: the first two numbers of the machines' addresses."""
        self.records = Records(state)
        self.timetable = Timetable(self.records)
        self.zone_faults = ZoneFaults(self.records)
        self.hosts = Hosts(self.records, self.timetable, network)
        self.guests = GuestAttributes(self.records, self.hosts)
        self.projects = Projects(self.records, self.timetable, self.zone_faults)
        self.policies = Policies(self.records, self.timetable, self.projects.gives_default_role)
        self.policies.find_machine_account = self._account_of_host
        self.resources = Resources(self.records, self.timetable)
        self.region_quotas = RegionQuotas(self.records)
        self.instances = Instances(self.resources, self.timetable, self.zone_faults, self.hosts, self.region_quotas)
        self.groups = Groups(self.resources, self.timetable, self.zone_faults, self.instances)
        self.networks = Networks(self.resources, self.zone_faults, self.region_quotas)
        operations, offers = Operations(self.records), Offers(self.zone_faults)
        self.nodes = Nodes(
            self.records,
            self.timetable,
            self.zone_faults,
            self.hosts,
            offers,
            operations,
            self.region_quotas,
            self.networks.check,
        )
        self.queue = Queue(self.records, self.timetable, self.zone_faults, self.nodes, operations)
        self.tpu = TpuService(
            self.projects.check, self.policies, self.nodes, self.queue, offers, self.guests, operations
        )
        operations.forget_old()
        self.resources.forget_old()

    def facts(self, host: RehearsedHost) -> Facts | None:
        """Return the facts of a host's machine; None if it is gone."""
        return self.nodes.facts(host) or self.instances.facts(host)

    def _account_of_host(self, host_id: str) -> str:
        """Return the service account of a host's machine; empty if there is no such host."""
        host = self.hosts.get(host_id)
        facts = self.facts(host) if host else None
        return facts.account if facts else ""

    def answer(self, handler: Callable[..., Any], *arguments: object) -> Any:
        """Run a handler after all due events; its changes are on the disk when this returns."""
        self.timetable.run_due()
        try:
            return handler(*arguments)
        finally:
            self.records.commit()
