"""A project at Google as a Provider: TPUs by the TPU API, VMs by Compute Engine."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tpuswarm.catalog import find
from tpuswarm.cloud.errors import CloudError, Invalid, NoQuota, NotFound, Unreachable
from tpuswarm.cloud.google import instances, nodes
from tpuswarm.cloud.google.access import SECONDS, Access
from tpuswarm.cloud.google.answers import of_compute, of_status
from tpuswarm.cloud.google.buckets import GoogleBucket
from tpuswarm.cloud.google.failures import judge
from tpuswarm.cloud.protocol import Bucket, Listing, Machine, Outcome, Spec, VmSpec

PAGE = 500
"""Machines an answer."""
TPU_HOST = "tpu.googleapis.com"


class Google:
    """Implements `Provider`. Every call has a time-out; a question is asked again for a while, a change never is."""

    def __init__(self, access: Access):
        self.access = access

    @property
    def project(self) -> str:
        """The project's id."""
        return self.access.project

    def machines(self, zones: Iterable[str]) -> Listing:
        """See Provider: a call for all nodes, one for all VMs, one a zone for queued requests; more for more pages.

        By plain REST: importing the clients takes longer than all the rest.
        """
        with ThreadPoolExecutor(16) as pool:
            vms = pool.submit(self._vms)
            # Requests before nodes: one that is active must then have its node among them.
            requests = list(pool.map(self._requests, sorted(set(zones))))
            found, unreachable = self._nodes()
            virtual, dark = vms.result()
        unreachable |= dark | {zone for zone, asked in requests if asked is None}
        queued = nodes.of_requests(
            (each for _, asked in requests for each in asked or ()), found, unreachable, self.project
        )
        return Listing((*found, *queued, *virtual), unreachable)

    def create(self, spec: Spec) -> str:
        """See Provider."""
        doing = f"creating {spec.name} in {spec.zone}"
        parent = self._parent(spec.zone)
        if isinstance(spec, VmSpec):
            instance = instances.to_instance(spec, self.project)
            return self._compute(doing, spec.zone, "Instances", "insert", instance_resource=instance)
        if find(spec.type).api_name is None:
            raise Invalid(f"{doing}: the TPU API has no {spec.type}, and tpuswarm makes TPUs by no other yet")
        if spec.how in ("queued", "reserved"):
            request = nodes.to_request(spec, self.project)
            begin = functools.partial(
                self.access.tpu.create_queued_resource,
                parent=parent,
                queued_resource_id=spec.name,
                queued_resource=request,
            )
        else:
            node = nodes.to_node(spec, self.project)
            begin = functools.partial(self.access.tpu.create_node, parent=parent, node_id=spec.name, node=node)
        return self._tpu(doing, begin)

    def delete(self, machine: Machine) -> str:
        """See Provider. The request that a TPU comes from takes its node with it."""
        doing = f"deleting {machine.name} in {machine.zone}"
        if machine.kind == "vm":
            return self._compute(doing, machine.zone, "Instances", "delete", instance=machine.name)
        if machine.request:
            name = f"{self._parent(machine.zone)}/queuedResources/{machine.request}"
            try:
                delete = self.access.tpu.delete_queued_resource
                return self._tpu(doing, functools.partial(delete, request={"name": name, "force": True}))
            except NotFound:
                pass  # somebody deleted the request alone
        return self._tpu(doing, functools.partial(self.access.tpu.delete_node, name=self._node(machine)))

    def stop(self, machine: Machine) -> str:
        """See Provider."""
        doing = f"stopping {machine.name} in {machine.zone}"
        known = nodes.accelerator_of(machine)
        if known and known.hosts > 1:
            raise Invalid(
                f"{machine.name} is a slice of {known.hosts} hosts, which the cloud cannot stop: delete it, it is made "
                "anew when it is wanted again"
            )
        if machine.spot:
            raise Invalid(f"{machine.name} is a spot machine, which could not be started again: delete it instead")
        if machine.kind == "vm":
            return self._compute(doing, machine.zone, "Instances", "stop", instance=machine.name)
        return self._tpu(doing, functools.partial(self.access.tpu.stop_node, request={"name": self._node(machine)}))

    def start(self, machine: Machine) -> str:
        """See Provider."""
        doing = f"starting {machine.name} in {machine.zone}"
        if machine.spot:
            raise Invalid(f"{machine.name} is a spot machine, which cannot be started again: a new one can be made")
        if machine.kind == "vm":
            return self._compute(doing, machine.zone, "Instances", "start", instance=machine.name)
        return self._tpu(doing, functools.partial(self.access.tpu.start_node, request={"name": self._node(machine)}))

    def outcome(self, operation: str) -> Outcome:
        """See Provider."""
        try:
            if "/locations/" in operation:
                return self._tpu_outcome(operation)
            return self._compute_outcome(operation)
        except NotFound:
            return Outcome(True, None)

    def types(self, zone: str) -> Sequence[str]:
        """See Provider: those of the TPU API."""
        ask = functools.partial(self.access.tpu.list_accelerator_types, parent=self._parent(zone), timeout=SECONDS)
        return self.access.ask(f"asking which TPUs {zone} offers", lambda: sorted(each.type_ for each in ask()))

    def runtimes(self, zone: str) -> Sequence[str]:
        """See Provider."""
        ask = functools.partial(self.access.tpu.list_runtime_versions, parent=self._parent(zone), timeout=SECONDS)
        doing = f"asking which runtime versions {zone} offers"
        return self.access.ask(doing, lambda: sorted(each.version for each in ask()))

    def set_metadata(self, machine: Machine, metadata: Mapping[str, str]) -> str:
        """See Provider. Both APIs replace all of it, so what is there is read before."""
        doing = f"setting {', '.join(sorted(metadata))} on {machine.name} in {machine.zone}"
        if machine.kind == "vm":
            there = self._instance(doing, machine)["metadata"]
            old = {each["key"]: each["value"] for each in there.get("items", ())}
            new = instances.to_metadata({**old, **metadata}, there.get("fingerprint"))
            place = {"instance": machine.name, "metadata_resource": new}
            return self._compute(doing, machine.zone, "Instances", "set_metadata", **place)
        from google.cloud import tpu_v2

        client, name = self.access.tpu, self._node(machine)
        old = self.access.ask(doing, lambda: dict(client.get_node(name=name, timeout=SECONDS).metadata))
        update = {"node": tpu_v2.Node(name=name, metadata={**old, **metadata}), "update_mask": {"paths": ["metadata"]}}
        return self._tpu(doing, functools.partial(client.update_node, request=update))

    def guest_attributes(self, machine: Machine, worker: int, path: str) -> Mapping[str, str]:
        """See Provider."""
        doing = f"reading what {machine.name} in {machine.zone} has written down"
        try:
            if machine.kind == "vm":
                place = f"projects/{self.project}/zones/{machine.zone}/instances/{machine.name}"
                url = self.access.url("compute.googleapis.com", f"compute/v1/{place}/getGuestAttributes")
                items = self.access.get(doing, url, queryPath=path).get("queryValue", {}).get("items", ())
                return {each["key"]: each["value"] for each in items}
            request = {"name": self._node(machine), "query_path": path, "worker_ids": [str(worker)]}
            ask = functools.partial(self.access.tpu.get_guest_attributes, request=request, timeout=SECONDS)
            found = self.access.ask(doing, ask).guest_attributes
            return {item.key: item.value for each in found for item in each.query_value.items}
        except NotFound:
            return {}

    def bucket(self, name: str) -> Bucket:
        """See Provider."""
        return GoogleBucket(self.access, name)

    def _nodes(self) -> tuple[list[Machine], frozenset[str]]:
        url = self.access.url(TPU_HOST, f"v2/{self._parent('-')}/nodes")
        pages = self.access.pages("listing TPUs", url, pageSize=str(PAGE))
        found = [nodes.of_node(each) for page in pages for each in page.get("nodes", ())]
        return found, frozenset(each.rsplit("/", 1)[-1] for page in pages for each in page.get("unreachable", ()))

    def _requests(self, zone: str) -> tuple[str, list[Any] | None]:
        """The queued resources of a zone; None: it cannot be asked."""
        url = self.access.url(TPU_HOST, f"v2/{self._parent(zone)}/queuedResources")
        try:
            pages = self.access.pages(f"listing queued TPUs in {zone}", url, pageSize=str(PAGE))
        except NoQuota:  # a zone that the project may not see holds nothing of it
            return zone, []
        except Unreachable:
            return zone, None
        if any(page.get("unreachable") for page in pages):
            return zone, None
        return zone, [each for page in pages for each in page.get("queuedResources", ())]

    def _vms(self) -> tuple[list[Machine], frozenset[str]]:
        url = self.access.url("compute.googleapis.com", f"compute/v1/projects/{self.project}/aggregated/instances")
        query = {"maxResults": str(PAGE), "returnPartialSuccess": "true"}
        found: list[Machine] = []
        dark: set[str] = set()
        for page in self.access.pages("listing VMs", url, **query):
            dark |= {each.rsplit("/", 1)[-1] for each in page.get("unreachables", ())}
            for scope, each in page.get("items", {}).items():
                if each.get("warning", {}).get("code") == "UNREACHABLE":
                    dark.add(scope.rsplit("/", 1)[-1])
                found += map(instances.of_instance, each.get("instances", ()))
        return found, frozenset(dark)

    def _instance(self, doing: str, machine: Machine) -> dict[str, Any]:
        place = f"projects/{self.project}/zones/{machine.zone}/instances/{machine.name}"
        return self.access.get(doing, self.access.url("compute.googleapis.com", f"compute/v1/{place}"))

    def _tpu(self, doing: str, begin: Callable[..., Any]) -> str:
        return self.access.change(doing, lambda: begin(timeout=SECONDS)).operation.name

    def _compute(self, doing: str, zone: str, client: str, verb: str, **fields: Any) -> str:
        # The plain verb would poll Google's own address whatever the client's is: the _unary one leaves that to us.
        begin = getattr(self.access.compute(client), f"{verb}_unary")
        fields |= {"project": self.project, "zone": zone}
        operation = self.access.change(doing, lambda: begin(timeout=SECONDS, **fields))
        return f"projects/{self.project}/zones/{zone}/operations/{operation.name}"

    def _tpu_outcome(self, name: str) -> Outcome:
        client = self.access.tpu
        operation = self.access.ask(
            "asking for an operation", lambda: client.get_operation({"name": name}, timeout=SECONDS)
        )
        if not operation.HasField("error"):
            return Outcome(operation.done, None)
        from google.cloud.tpu_v2 import OperationMetadata

        about = OperationMetadata.deserialize(operation.metadata.value)
        doing = f"{about.verb or 'operation'} of {about.target.rsplit('/', 1)[-1] or name}"
        return Outcome(True, judge(of_status(operation.error), doing, self.project))

    def _compute_outcome(self, name: str) -> Outcome:
        _, project, _, zone, _, operation = name.split("/")
        fields = {"project": project, "zone": zone, "operation": operation}
        client = self.access.compute("ZoneOperations")
        found = self.access.ask("asking for an operation", lambda: client.get(timeout=SECONDS, **fields))
        answer = of_compute(found)
        error: CloudError | None = None
        if answer:
            doing = f"{found.operation_type or 'operation'} of {found.target_link.rsplit('/', 1)[-1]} in {zone}"
            error = judge(answer, doing, self.project)
        return Outcome(found.status.name == "DONE", error)

    def _parent(self, zone: str) -> str:
        return f"projects/{self.project}/locations/{zone}"

    def _node(self, machine: Machine) -> str:
        return f"{self._parent(machine.zone)}/nodes/{machine.name}"
