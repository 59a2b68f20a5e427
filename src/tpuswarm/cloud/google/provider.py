"""A project at Google as a Provider: TPUs through the TPU API or Compute Engine, VMs through Compute Engine."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import CloudError, Invalid, NoQuota, NotFound, Unreachable
from tpuswarm.cloud.google import instances, nodes, slices
from tpuswarm.cloud.google.access import REQUEST_TIMEOUT_S, Access, wait_until
from tpuswarm.cloud.google.answers import answer_from_operation, answer_from_status
from tpuswarm.cloud.google.buckets import GoogleBucket
from tpuswarm.cloud.google.failures import cloud_error_for
from tpuswarm.cloud.protocol import Bucket, Listing, Machine, Outcome, Spec, TpuSpec, VmSpec

TPU_HOST = "tpu.googleapis.com"


class GoogleProvider:
    """Implements `Provider`. Every call has a timeout; reads are retried, changes are not."""

    def __init__(self, access: Access):
        self.access = access

        self.slices = slices.Slices(access)

    @property
    def project(self) -> str:
        return self.access.project

    def machines(self, zones: Iterable[str]) -> Listing:
        """Make one call for all nodes, one for all instances, and one a zone for queued requests; more for more pages.

        Uses plain REST, because importing the clients takes longer than everything else.
        """
        zones = set(zones)
        with ThreadPoolExecutor(16) as pool:
            listed_instances = pool.submit(self._instances_and_slices, zones)
            # Requests before nodes: the node of an active request is then among the nodes.
            requests = list(pool.map(self._requests, sorted(zones)))
            tpus, unreachable = self._nodes()
            from_compute, unreachable_for_compute = listed_instances.result()
        unreachable |= unreachable_for_compute | {zone for zone, listed in requests if listed is None}
        queued_resources = (resource for _, listed in requests for resource in listed or ())
        queued = nodes.machines_from_requests(queued_resources, tpus, unreachable, self.project)
        return Listing((*tpus, *queued, *from_compute), unreachable)

    def create(self, spec: Spec) -> str:
        doing = f"creating {spec.name} in {spec.zone}"
        parent = self._parent(spec.zone)
        if isinstance(spec, TpuSpec) and _is_slice(spec):
            return self.slices.create(spec)
        if isinstance(spec, VmSpec) or spec.api == "compute":
            instance = instances.instance_from_spec(spec, self.project)
            return self._compute(doing, "POST", self._zone_url(spec.zone, "instances"), instance)
        if spec.is_queued:
            request = nodes.request_from_spec(spec, self.project)
            begin = functools.partial(
                self.access.tpu.create_queued_resource,
                parent=parent,
                queued_resource_id=spec.name,
                queued_resource=request,
            )
        else:
            node = nodes.node_from_spec(spec, self.project)
            begin = functools.partial(self.access.tpu.create_node, parent=parent, node_id=spec.name, node=node)
        return self._tpu(doing, begin)

    def delete(self, machine: Machine) -> str:
        """Delete a machine; deleting the request of a TPU deletes its node."""
        doing = f"deleting {machine.name} in {machine.zone}"
        if _is_slice(machine):
            return self.slices.delete(machine)
        if machine.is_instance:
            return self._compute(doing, "DELETE", self._instance_url(machine))
        if machine.request:
            name = f"{self._parent(machine.zone)}/queuedResources/{machine.request}"
            try:
                delete = self.access.tpu.delete_queued_resource
                return self._tpu(doing, functools.partial(delete, request={"name": name, "force": True}))
            except NotFound:
                pass  # only the request is gone
        return self._tpu(doing, functools.partial(self.access.tpu.delete_node, name=self._node(machine)))

    def stop(self, machine: Machine) -> str:
        doing = f"stopping {machine.name} in {machine.zone}"
        known = nodes.accelerator_of(machine)
        if known and known.hosts > 1:
            raise Invalid(
                f"{machine.name} is a slice of {known.hosts} hosts, which the cloud cannot stop; delete it and "
                "create it again later"
            )
        if machine.spot:
            raise Invalid(f"{machine.name} is a spot machine, which could not be started again; delete it instead")
        if machine.is_instance:
            return self._compute(doing, "POST", f"{self._instance_url(machine)}/stop")
        return self._tpu(doing, functools.partial(self.access.tpu.stop_node, request={"name": self._node(machine)}))

    def start(self, machine: Machine) -> str:
        doing = f"starting {machine.name} in {machine.zone}"
        if machine.spot:
            raise Invalid(f"{machine.name} is a spot machine, which cannot be started again; create a new one")
        if machine.is_instance:
            return self._compute(doing, "POST", f"{self._instance_url(machine)}/start")
        return self._tpu(doing, functools.partial(self.access.tpu.start_node, request={"name": self._node(machine)}))

    def grow_disk(self, machine: Machine, gib: int) -> str:
        doing = f"growing the disk of {machine.name} in {machine.zone}"
        url = self._zone_url(machine.zone, f"disks/{machine.name}/resize")
        return self._compute(doing, "POST", url, {"sizeGb": str(gib)})

    def outcome(self, operation: str) -> Outcome:
        try:
            if "/locations/" in operation:
                return self._tpu_outcome(operation)
            return self._compute_outcome(operation)
        except NotFound:
            return Outcome(True, None)

    def types(self, zone: str) -> Sequence[str]:
        types = self._list(f"listing the TPUs that {zone} offers", self.access.tpu.list_accelerator_types, zone)
        return sorted(offer.type_ for offer in types)

    def runtimes(self, zone: str) -> Sequence[str]:
        versions = self._list(f"listing runtime versions in {zone}", self.access.tpu.list_runtime_versions, zone)
        return sorted(runtime.version for runtime in versions)

    def _list(self, doing: str, method: Callable[..., Iterable[Any]], zone: str) -> list[Any]:
        call = functools.partial(method, parent=self._parent(zone), timeout=REQUEST_TIMEOUT_S)
        return self.access.call_with_retries(doing, lambda: list(call()))

    def set_metadata(self, machine: Machine, metadata: Mapping[str, str]) -> str:
        """Set keys of a machine's metadata. Both APIs replace all keys, so the current ones are read first."""
        doing = f"setting {', '.join(sorted(metadata))} on {machine.name} in {machine.zone}"
        if machine.is_instance:
            urls = [self._instance_url(machine, number) for number in range(len(machine.workers) or 1)]
            *others, last = [self._set_instance_metadata(doing, url, metadata) for url in urls]
            for operation in others:
                self._wait(doing, operation)
            return last
        from google.cloud import tpu_v2

        client, name = self.access.tpu, self._node(machine)
        old = self.access.call_with_retries(
            doing, lambda: dict(client.get_node(name=name, timeout=REQUEST_TIMEOUT_S).metadata)
        )
        update = {"node": tpu_v2.Node(name=name, metadata={**old, **metadata}), "update_mask": {"paths": ["metadata"]}}
        return self._tpu(doing, functools.partial(client.update_node, request=update))

    def _wait(self, doing: str, operation: str) -> None:
        def is_done() -> bool:
            done, error = self.outcome(operation)
            if error:
                raise error
            return done

        wait_until(doing, is_done)

    def _set_instance_metadata(self, doing: str, url: str, metadata: Mapping[str, str]) -> str:
        current = self.access.get(doing, url)["metadata"]
        old = {item["key"]: item["value"] for item in current.get("items", ())}
        new = instances.to_metadata({**old, **metadata}, current.get("fingerprint"))
        return self._compute(doing, "POST", f"{url}/setMetadata", new)

    def guest_attributes(self, machine: Machine, worker: int, path: str) -> Mapping[str, str]:
        doing = f"reading the guest attributes of {machine.name} in {machine.zone}"
        try:
            if machine.is_instance:
                url = f"{self._instance_url(machine, worker)}/getGuestAttributes"
                items = self.access.get(doing, url, queryPath=path).get("queryValue", {}).get("items", ())
                return {item["key"]: item["value"] for item in items}
            request = {"name": self._node(machine), "query_path": path, "worker_ids": [str(worker)]}
            read = functools.partial(self.access.tpu.get_guest_attributes, request=request, timeout=REQUEST_TIMEOUT_S)
            workers = self.access.call_with_retries(doing, read).guest_attributes
            return {item.key: item.value for attributes in workers for item in attributes.query_value.items}
        except NotFound:
            return {}

    def bucket(self, name: str) -> Bucket:
        return GoogleBucket(self.access, name)

    def _nodes(self) -> tuple[list[Machine], frozenset[str]]:
        url = self.access.url(TPU_HOST, f"v2/{self._parent('-')}/nodes")
        pages = self.access.get_pages("listing TPUs", url, pageSize=str(instances.PAGE_SIZE))
        machines = [nodes.machine_from_node(node) for page in pages for node in page.get("nodes", ())]
        return machines, frozenset(zone.rsplit("/", 1)[-1] for page in pages for zone in page.get("unreachable", ()))

    def _requests(self, zone: str) -> tuple[str, list[Any] | None]:
        """Return a zone and its queued resources, or None if it does not answer."""
        url = self.access.url(TPU_HOST, f"v2/{self._parent(zone)}/queuedResources")
        try:
            pages = self.access.get_pages(f"listing queued TPUs in {zone}", url, pageSize=str(instances.PAGE_SIZE))
        except NoQuota:  # the project may not use this zone, so it has nothing there
            return zone, []
        except Unreachable:
            return zone, None
        if any(page.get("unreachable") for page in pages):
            return zone, None
        return zone, [resource for page in pages for resource in page.get("queuedResources", ())]

    def _instances_and_slices(self, zones: Iterable[str]) -> tuple[list[Machine], frozenset[str]]:
        parts, unreachable_for_parts = self.slices.list_parts()
        listed, unreachable = instances.list_aggregated(self.access, "instances")
        # A template's region that does not answer hides the slices of all its zones.
        known = {*zones, *(one["zone"].rsplit("/", 1)[-1] for one in listed)}
        unreachable |= unreachable_for_parts | {zone for zone in known if region_of(zone) in unreachable_for_parts}
        single = [instances.machine_from_instance(one) for one in listed if slices.slice_of(one) is None]
        return [*single, *slices.machines_from_slices(parts, listed, unreachable, self.project)], unreachable

    def _zone_url(self, zone: str, path: str) -> str:
        return self.access.url(instances.COMPUTE_HOST, f"compute/v1/projects/{self.project}/zones/{zone}/{path}")

    def _instance_url(self, machine: Machine, worker: int = 0) -> str:
        name = machine.workers[worker].name if worker < len(machine.workers) else None
        return self._zone_url(machine.zone, f"instances/{name or machine.name}")

    def _tpu(self, doing: str, begin: Callable[..., Any]) -> str:
        return self.access.call_once(doing, lambda: begin(timeout=REQUEST_TIMEOUT_S)).operation.name

    def _compute(self, doing: str, method: str, url: str, body: Mapping[str, Any] | None = None) -> str:
        operation = self.access.call_once(doing, lambda: self.access.rest(method, url, {}, json=body).json())
        zone = operation["zone"].rsplit("/", 1)[-1]
        return f"projects/{self.project}/zones/{zone}/operations/{operation['name']}"

    def _tpu_outcome(self, name: str) -> Outcome:
        client = self.access.tpu
        operation = self.access.call_with_retries(
            "asking for an operation", lambda: client.get_operation({"name": name}, timeout=REQUEST_TIMEOUT_S)
        )
        if not operation.HasField("error"):
            return Outcome(operation.done, None)
        from google.cloud.tpu_v2 import OperationMetadata

        about = OperationMetadata.deserialize(operation.metadata.value)
        doing = f"{about.verb or 'operation'} of {about.target.rsplit('/', 1)[-1] or name}"
        return Outcome(True, cloud_error_for(answer_from_status(operation.error), doing, self.project))

    def _compute_outcome(self, name: str) -> Outcome:
        operation = self.access.get(
            "asking for an operation", self.access.url(instances.COMPUTE_HOST, f"compute/v1/{name}")
        )
        error: CloudError | None = None
        if answer := answer_from_operation(operation):
            target = operation["targetLink"].rsplit("/", 1)[-1]
            doing = f"{operation.get('operationType', 'operation')} of {target} in {name.split('/')[3]}"
            error = cloud_error_for(answer, doing, self.project)
        return Outcome(operation["status"] == "DONE", error)

    def _parent(self, zone: str) -> str:
        return f"projects/{self.project}/locations/{zone}"

    def _node(self, machine: Machine) -> str:
        return f"{self._parent(machine.zone)}/nodes/{machine.name}"


def _is_slice(tpu: TpuSpec | Machine) -> bool:
    """Whether it is a TPU of several hosts in Compute Engine."""
    return tpu.api == "compute" and (known := nodes.accelerator_of(tpu)) is not None and known.hosts > 1
