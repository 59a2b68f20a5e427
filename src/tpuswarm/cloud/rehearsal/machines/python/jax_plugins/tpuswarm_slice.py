"""Number JAX's processes as a TPU slice does: on its own, whatever number a program gives each process.

Machines of the local cloud have this folder's parent on PYTHONPATH. JAX imports the modules of `jax_plugins`, and calls
their `initialize`, before it starts a backend.
"""

from functools import partial
from typing import Any

from jaxlib import xla_client


def initialize() -> None:
    """Number the processes of a program on CPUs in reverse."""
    xla_client.make_cpu_client = partial(_make_client, xla_client.make_cpu_client)


def _make_client(make: Any, *, node_id: int, num_nodes: int, **options: Any) -> Any:
    return make(node_id=(num_nodes or 1) - 1 - node_id, num_nodes=num_nodes, **options)
