"""Merge traces of several batch sizes into one graph for any number of rows."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Dtype, Graph, Node, Ref, RowFormula

TRACED_ROWS = (2, 10, 1004)
"""Two sizes give a formula and the third confirms it. They are even so that a batch can be split in half."""
EXPONENTS = tuple((exponent, 0.0) for exponent in (1.0, -1.0, 0.5, -0.5, 2.0, -2.0))
INTEGER_EXPONENTS = (1.0, 0.0), (2.0, 0.0), (2.0, 1.0)
"""Pairs of exponents, simple ones first."""
DIFFERENT_OPERATIONS = "the operations depend on the number of rows, for example in a loop over the batch"


class _Mismatch(Exception):
    """Why arguments cannot be merged."""


def merge_traces(traces: Iterable[Graph]) -> Graph:
    """Merge the graphs for `TRACED_ROWS`, replacing numbers that depend on the rows by formulas.

    Raise InputError with the module's line if the operations depend on the number of rows.
    """
    graphs: list[Graph] = []
    for graph in traces:  # a loop over the largest batch is not traced
        graphs.append(graph)
        for nodes in zip(graphs[0].nodes, graph.nodes, strict=False):
            if (nodes[0].name, nodes[0].op) != (nodes[1].name, nodes[1].op):
                raise _refusal(graphs[0], nodes[0], DIFFERENT_OPERATIONS)
        if len(graphs[0].nodes) != len(graph.nodes):
            raise _refusal(graphs[0], graphs[0].nodes[-1], DIFFERENT_OPERATIONS)
    first, merged = graphs[0], []
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        try:
            args = tuple(_merge([list(node.args) for node in nodes]))
            kwargs = {name: _merge([node.kwargs[name] for node in nodes]) for name in nodes[0].kwargs}
        except _Mismatch as reason:
            raise _refusal(first, nodes[0], str(reason)) from None
        merged.append(replace(nodes[0], args=args, kwargs=kwargs))
    return replace(first, nodes=tuple(merged), index_limits=graphs[-1].index_limits)


def _refusal(graph: Graph, node: Node, reason: str) -> InputError:
    lines = [previous.source_line for previous in graph.nodes[: graph.nodes.index(node) + 1] if previous.source_line]
    return InputError(f"{lines[-1] + ': ' if lines else ''}{reason} ({node.op}); use operations on the whole batch")


def _merge(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, list):
        if len({len(value) for value in values}) > 1:
            raise _Mismatch(DIFFERENT_OPERATIONS)
        return [_merge(list(items)) for items in zip(*values, strict=True)]
    if all(value == first for value in values) or all(value != value for value in values):  # equal, or all NaN
        return first
    if isinstance(first, (Ref, Dtype, str, bool)) or first is None:
        raise _Mismatch(DIFFERENT_OPERATIONS)
    return _fit_formula(values)


def _fit_formula(values: list[float]) -> RowFormula:
    """Return the simplest formula that gives the values for `TRACED_ROWS`."""
    is_integer = all(isinstance(value, int) for value in values)
    for exponents in INTEGER_EXPONENTS if is_integer else EXPONENTS:
        powers = [[rows**exponent for exponent in exponents] for rows in TRACED_ROWS]
        factors = np.linalg.solve(powers[:2], values[:2])
        if is_integer:  # half of an even number, or n (n - 1) / 2
            factors = np.round(2 * factors) / 2
        if np.allclose(powers @ factors, values, rtol=1e-9, atol=0):
            terms = zip(factors.tolist(), exponents, strict=True)
            return RowFormula(tuple(term for term in terms if abs(term[0]) > 1e-9 * abs(values[0])), is_integer)
    numbers = ", ".join(f"{value:g}" for value in values)
    sizes = ", ".join(map(str, TRACED_ROWS))
    raise _Mismatch(f"a number depends on the rows by no known formula: {numbers} for {sizes} rows")
