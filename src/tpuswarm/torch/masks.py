"""Masks of attention that no data decides: what a kernel calls causal, or none at all."""

from typing import Any


def plain_masks(torch: Any, module: Any) -> None:
    """Take masks out of the attention of a traced graph that only say "not later" or "everywhere".

    transformers compares positions to make them; no kernel takes those, and they need much memory.
    """
    forward, known = torch.ops.tpuswarm.attention.default, dict[Any, Any]()
    causal: dict[Any, bool | None] = {}
    for node in module.graph.nodes:
        backward = node.target is torch.ops.tpuswarm.attention_backward.default
        if node.target is not forward and not backward:
            continue
        first = 2 if backward else 0
        mask = node.args[first + 3]
        if not isinstance(mask, torch.fx.Node):
            continue
        if mask not in causal:
            causal[mask] = _kind(torch, _value(torch, module, mask, known))
        if causal[mask] is not None:
            args = list(node.args)
            args[first + 3], args[first + 5] = None, causal[mask]
            node.args = tuple(args)


def _kind(torch: Any, mask: Any) -> bool | None:
    """True for a causal mask, False for one that hides nothing, None for every other."""
    if mask is None or mask.dim() < 2:
        return None
    if mask.dtype != torch.bool:  # added to the scores
        hidden = mask <= torch.finfo(mask.dtype).min
        if not bool((hidden | (mask == 0)).all()):
            return None
        mask = ~hidden
    if bool(mask.all()):
        return False
    square = mask.shape[-1] == mask.shape[-2]
    return True if square and bool((mask == torch.ones(mask.shape[-2:], dtype=torch.bool).tril()).all()) else None


def _value(torch: Any, module: Any, node: Any, known: dict[Any, Any]) -> Any:
    """What a node is, whatever the data; None where parameters or data decide."""
    waiting = [node]
    while waiting:
        each = waiting[-1]
        missing = [other for other in each.all_input_nodes if other not in known]
        if missing:
            waiting += missing
            continue
        known[waiting.pop()] = _computed(torch, module, each, known)
    return known[node]


def _computed(torch: Any, module: Any, node: Any, known: dict[Any, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(module, node.target)
    if node.op != "call_function" or any(known[each] is None for each in node.all_input_nodes):
        return None
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), known.get)
    return node.target(*args, **(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))
