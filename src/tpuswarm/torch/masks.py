"""Masks of attention that no data decides: what a kernel calls causal, or none at all."""

from collections.abc import Mapping
from typing import Any


def plain_masks(torch: Any, program: Any, batch: Mapping[str, Any]) -> None:
    """Take masks out of the attention of an exported program that only say "not later" or "everywhere".

    transformers compares positions to make them; no kernel takes those, and they need much memory. A mask that follows
    from sizes alone is computed here, for the rows that were traced, and looked at.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default
    inputs = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    known: dict[Any, Any] = {}
    for node in program.graph.nodes:
        mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
        if node.target is not attention or not isinstance(mask, torch.fx.Node):
            continue
        causal = _kind(torch, _value(torch, mask, dict(zip(inputs, batch.values(), strict=True)), known))
        if causal is not None:
            rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            rest = {name: each for name, each in node.kwargs.items() if name in ("scale", "enable_gqa")}
            node.args, node.kwargs = (*node.args[:3], None, rate, causal), rest


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


def _value(torch: Any, node: Any, inputs: Mapping[str, Any], known: dict[Any, Any]) -> Any:
    """What a node is, whatever the data; None where that decides."""
    order, waiting = [], [node]
    while waiting:  # its ancestors; the graph's own order is one in which they can be computed
        each = waiting.pop()
        if each not in known and each not in order:
            order.append(each)
            if not _size_of_input(torch, each):
                waiting += each.all_input_nodes
    for each in sorted(order, key=list(node.graph.nodes).index):
        known[each] = _computed(torch, each, inputs, known)
    return known[node]


def _size_of_input(torch: Any, node: Any) -> bool:
    return node.target is torch.ops.aten.sym_size.int and node.args[0].op == "placeholder"


def _computed(torch: Any, node: Any, inputs: Mapping[str, Any], known: Mapping[Any, Any]) -> Any:
    if _size_of_input(torch, node):
        given = inputs.get(node.args[0].name)
        return None if given is None else given.shape[node.args[1]]
    if node.op != "call_function" or any(known[each] is None for each in node.all_input_nodes):
        return None
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), known.get)
    return node.target(*args, **(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))
