"""Simplify attention masks that do not depend on data. Needs torch."""

from typing import Any

import torch

MAX_MASK_SIZE = 2**24
"""Elements; larger masks take much memory."""


def simplify_attention_masks(module: Any, known: list[bool | None]) -> None:
    """Replace masks of a traced graph that are causal or hide nothing by the `causal` argument of attention.

    transformers computes such masks from positions. They take memory, and no kernel supports them.
    known: whether each mask is causal, in the graph of another number of rows; of use for masks that are too large to
    compute here. Empty before the first graph, which fills it.
    """
    values = dict[Any, Any]()
    kinds: dict[Any, bool | None] = {}
    first_argument = {torch.ops.tpuswarm.attention.default: 0, torch.ops.tpuswarm.attention_backward.default: 2}
    for node in module.graph.nodes:
        if node.target not in first_argument:
            continue
        first = first_argument[node.target]
        mask = node.args[first + 3]
        if not isinstance(mask, torch.fx.Node):
            continue
        if mask not in kinds:
            is_large = mask.meta["val"].numel() > MAX_MASK_SIZE and len(kinds) < len(known)
            kinds[mask] = known[len(kinds)] if is_large else _is_causal(_evaluate(module, mask, values))
        if kinds[mask] is not None:
            args = list(node.args)
            args[first + 3], args[first + 5] = None, kinds[mask]
            node.args = tuple(args)
    if not known:
        known += kinds.values()


def _is_causal(mask: Any) -> bool | None:
    """Return True for a causal mask, False for one that hides nothing, None for every other."""
    if mask is None or mask.dim() < 2:
        return None
    if mask.dtype != torch.bool:  # added to the scores
        is_hidden = mask <= torch.finfo(mask.dtype).min
        if not bool((is_hidden | (mask == 0)).all()):
            return None
        mask = ~is_hidden
    if bool(mask.all()):
        return False
    is_square = mask.shape[-1] == mask.shape[-2]
    return True if is_square and bool((mask == torch.ones(mask.shape[-2:], dtype=torch.bool).tril()).all()) else None


def _evaluate(module: Any, node: Any, values: dict[Any, Any]) -> Any:
    """Return the value of a node, or None if it depends on parameters or data."""
    stack = [node]
    while stack:
        missing = [argument for argument in stack[-1].all_input_nodes if argument not in values]
        if missing:
            stack += missing
        else:
            ready = stack.pop()
            values[ready] = _evaluate_with(module, ready, values)
    return values[node]


def _evaluate_with(module: Any, node: Any, values: dict[Any, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(module, node.target)
    if node.op != "call_function" or any(values[argument] is None for argument in node.all_input_nodes):
        return None
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.get)
    return node.target(*args, **(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))
