"""Find which arrays of the data index a table, such as token ids and targets. Needs torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tpuswarm.torch.graph import IndexLimit
from tpuswarm.torch.trace import Location

SAME_VALUES = {
    "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "clone", "alias", "detach",
    "_to_copy",
}  # fmt: skip
"""Operators that only change the shape or the dtype of their input."""
SLICE_DEFAULTS: tuple[Any, ...] = 0, None, None, 1
"""Axis, start, end and step."""


class _Lookup(NamedTuple):
    """Positions among an operator's arguments."""

    table: int
    indices: int
    axis: int | None = None
    """None for a fixed axis of the table: the classes of a loss, else the first."""
    ignored: int | None = None
    """The index that is not looked up."""


LOOKUPS = {
    "embedding": _Lookup(0, 1), "gather": _Lookup(0, 2, axis=1), "index_select": _Lookup(0, 2, axis=1),
    "nll_loss_backward": _Lookup(1, 2, ignored=5), "nll_loss2d_backward": _Lookup(1, 2, ignored=5),
}  # fmt: skip


def find_index_limits(
    graph: Any, arrays: Mapping[str, str], rows: int, locations: Mapping[Any, Location]
) -> tuple[IndexLimit, ...]:  # fmt: skip
    """Return the limits of arrays that reach a look-up unchanged.

    arrays: names of the batch's arrays by input node; rows: of the traced batch; a table of that size is skipped, as
    its size may depend on the rows.
    """
    limits = dict[IndexLimit, None]()  # ordered
    for node in graph.nodes:
        lookup = LOOKUPS.get(_operator(node))
        if lookup is None:
            continue
        source, slices = node.args[lookup.indices], list[Any]()
        while _operator(source) in SAME_VALUES:
            source = source.args[0]
        while _operator(source) == "slice":
            slices.insert(0, tuple(source.args[1:]) + SLICE_DEFAULTS[len(source.args) - 1 :])
            source = source.args[0]
        table = node.args[lookup.table].meta["val"]
        axis = node.args[lookup.axis] if lookup.axis is not None else min(1, table.dim() - 1) * bool(lookup.ignored)
        size = table.shape[axis] if table.dim() else 1
        if source.name in arrays and size != rows and all(dim > 0 for dim, *_ in slices):
            ignored = None if lookup.ignored is None else node.args[lookup.ignored]
            limits[IndexLimit(arrays[source.name], tuple(slices), size, ignored, locations[node].source_line)] = None
    return tuple(limits)


def _operator(node: Any) -> str:
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return str(node.target._schema.name.partition("::")[2].removesuffix("_copy"))
