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
    first_argument = {torch.ops.tpuswarm.attention.default: 0, torch.ops.tpuswarm.attention_backward.default: 2}
    attentions = [(node, first_argument[node.target]) for node in module.graph.nodes if node.target in first_argument]
    masks = [mask for node, first in attentions if isinstance(mask := node.args[first + 3], torch.fx.Node)]
    kinds = {
        mask: kind
        for mask, kind in zip(dict.fromkeys(masks), known, strict=False)
        if mask.meta["val"].numel() > MAX_MASK_SIZE
    }
    values = _evaluate(module, set(masks) - kinds.keys())
    kinds |= {mask: _is_causal(values[mask]) for mask in masks if mask not in kinds}
    for node, first in attentions:
        kind = kinds.get(node.args[first + 3])
        if kind is not None:
            node.args = (*node.args[: first + 3], None, node.args[first + 4], kind, *node.args[first + 6 :])
    if not known:
        known += (kinds[mask] for mask in dict.fromkeys(masks))


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


def _evaluate(module: Any, nodes: set[Any]) -> dict[Any, Any]:
    """Return the values of nodes and of those that they need; None if they depend on parameters or data."""
    needed, values = set(nodes), dict[Any, Any]()
    for node in reversed(module.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in module.graph.nodes:
        if node not in needed:
            continue
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        has_values = all(values[argument] is not None for argument in node.all_input_nodes)
        values[node] = None
        if node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "call_function" and has_values and not is_random:
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.get)
            values[node] = node.target(*args, **(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))
    return values
