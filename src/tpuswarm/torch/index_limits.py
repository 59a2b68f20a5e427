"""Find which arrays of the data index a table, such as token ids and targets. Needs torch."""

from collections.abc import Mapping
from typing import Any

import torch

from tpuswarm.torch.graph import IndexLimit
from tpuswarm.torch.trace import location_of

SAME_VALUES = {
    "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "clone", "alias", "detach",
    "_to_copy",
}  # fmt: skip
"""Operators that only change the shape or the dtype of their input."""
SLICE_DEFAULTS: tuple[Any, ...] = 0, None, None, 1
"""Axis, start, end and step."""


LOOKUPS = {
    "embedding": (0, 1), "gather": (0, 2), "index_select": (0, 2), "nll_loss_backward": (1, 2),
    "nll_loss2d_backward": (1, 2),
}  # fmt: skip
"""Positions of the table and of the indices among an operator's arguments."""


def find_index_limits(
    graph: Any, arrays: Mapping[str, str], rows: int
) -> tuple[IndexLimit, ...]:  # fmt: skip
    """Return the limits of arrays that reach a look-up unchanged.

    arrays: names of the batch's arrays by input node; rows: of the traced batch; a table of that size is skipped, as
    its size may depend on the rows.
    """
    limits = dict[IndexLimit, None]()  # ordered
    for node in graph.nodes:
        name, slices = _operator(node), list[Any]()
        if name not in LOOKUPS:
            continue
        table, source = (node.args[position] for position in LOOKUPS[name])
        while _operator(source) in SAME_VALUES:
            source = source.args[0]
        while _operator(source) == "slice":
            slices.insert(0, tuple(source.args[1:]) + SLICE_DEFAULTS[len(source.args) - 1 :])
            source = source.args[0]
        shape, axis, ignored = table.meta["val"].shape, 0, None
        if name.startswith("nll_loss"):
            axis, ignored = min(1, len(shape) - 1), node.args[5]
        elif name != "embedding":
            axis = node.args[1]
        size = shape[axis] if shape else 1
        if source.name in arrays and size != rows and all(dim > 0 for dim, *_ in slices):
            limits[IndexLimit(arrays[source.name], tuple(slices), size, ignored, location_of(node).source_line)] = None
    return tuple(limits)


def _operator(node: Any) -> str:
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return str(node.target._schema.name.partition("::")[2].removesuffix("_copy"))
