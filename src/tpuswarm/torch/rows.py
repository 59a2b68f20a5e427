"""One graph for any number of rows, from graphs that were traced for several."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Dtype, Graph, Node, Ref, Rows

SIZES = (6, 10, 16)
"""The rows that are traced: two of them give a number's rule, the third proves it. Even, so that halves are sizes."""
OTHER = "the operations depend on the number of rows, as those of a loop over the batch do"
POWERS = (1.0, -1.0, 0.5, -0.5, 2.0, -2.0)


class _Different(Exception):
    """Where the graphs are not alike, in words."""


def merged(graphs: Sequence[Graph]) -> Graph:
    """A graph in which numbers that depend on the rows say how. graphs: for `SIZES`, in this order.

    Raises InputError, with the module's line, where a graph does something else for another number of rows.
    """
    first = graphs[0]
    for nodes in zip(*(graph.nodes for graph in graphs), strict=False):
        if len({(node.name, node.op) for node in nodes}) > 1:
            raise _refused(first, nodes[0], OTHER)
    if len({len(graph.nodes) for graph in graphs}) > 1:
        raise _refused(first, first.nodes[-1], OTHER)
    found = []
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        try:
            args = tuple(_value([list(node.args) for node in nodes]))
            kwargs = {name: _value([node.kwargs[name] for node in nodes]) for name in nodes[0].kwargs}
        except _Different as why:
            raise _refused(first, nodes[0], str(why)) from None
        found.append(replace(nodes[0], args=args, kwargs=kwargs))
    return replace(first, nodes=tuple(found))


def _refused(graph: Graph, node: Node, why: str) -> InputError:
    before = [each.where for each in graph.nodes[: graph.nodes.index(node) + 1] if each.where]
    return InputError(f"{before[-1] + ': ' if before else ''}{why} ({node.op}): use operations on the whole batch")


def _value(values: list[Any]) -> Any:
    one = values[0]
    if isinstance(one, list):
        if len({len(each) for each in values}) > 1:
            raise _Different(OTHER)
        return [_value(list(each)) for each in zip(*values, strict=True)]
    if isinstance(one, (Ref, Dtype, str, bool)) or one is None:
        if any(each != one for each in values):
            raise _Different(OTHER)
        return one
    if all(each == one for each in values) or all(each != each for each in values):
        return one
    return _rule(values)


def _rule(values: list[float]) -> Rows:
    """The simplest rule by which a number follows from the rows."""
    whole = all(isinstance(each, int) for each in values)
    for power in (1.0, 2.0) if whole else POWERS:
        low, high, last = (size**power for size in SIZES)
        factor = (values[1] - values[0]) / (high - low)
        rest = values[0] - factor * low
        if math.isclose(factor * last + rest, values[2], rel_tol=1e-9):
            terms = ((factor, power),) if abs(rest) < 1e-9 * abs(values[0]) else ((factor, power), (rest, 0.0))
            return Rows(terms, whole)
    squares, once = np.linalg.solve([[size**2, size] for size in SIZES[:2]], values[:2])
    halves = all(abs(2 * each - round(2 * each)) < 1e-6 for each in (squares, once))  # as in n (n - 1) / 2
    if whole and halves and math.isclose(squares * SIZES[2] ** 2 + once * SIZES[2], values[2], rel_tol=1e-9):
        return Rows(((round(2 * squares) / 2, 2.0), (round(2 * once) / 2, 1.0)))
    numbers = ", ".join(f"{each:g}" for each in values)
    raise _Different(f"a number depends on the rows by no known rule: {numbers} for {', '.join(map(str, SIZES))} rows")
