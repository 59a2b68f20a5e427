"""What stands for functions of torch while a step is recorded. Needs torch.

Attention, recurrent layers and CTC stay one operator, with their backward pass as a second one: JAX has forms of its
own for them. Others are said in a way that no value of the data decides.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from tpuswarm.errors import InputError

RECURRENT = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
"""By name, with the number of their states."""
ATTENTION = "(Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout, bool causal, float? scale, bool groups)"
CELLS = (
    "(Tensor x, Tensor[] states, Tensor[] params, bool biases, int layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first)"
)


@functools.cache
def replacements() -> dict[Any, Callable[..., Any]]:
    """What stands for each function of torch: it calls one of our operators, `tpuswarm::…`."""
    import torch

    attention = _operator(torch, "attention", ATTENTION, "Tensor", _attended, 4)

    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    functional = torch.nn.functional
    found = {
        functional.scaled_dot_product_attention: scaled_dot_product_attention,
        functional.embedding: _dense(torch, functional.embedding),
        functional.embedding_bag: _bags(torch),
        functional.gaussian_nll_loss: _gaussian(torch),
        functional.ctc_loss: _ctc(torch),
    }
    for each in (torch.linalg.det, torch.linalg.slogdet, torch.linalg.solve, torch.det, torch.slogdet, torch.logdet):
        found[each] = _by_columns(each)
    for name, states in RECURRENT.items():
        results = ", ".join(["Tensor"] * (1 + states))
        cells = _operator(torch, name, CELLS, f"({results})", _cells, 3)
        found[getattr(torch, name)] = _recurrent(torch, getattr(torch, name), cells)
    return found


def _recurrent(torch: Any, theirs: Any, ours: Any) -> Callable[..., Any]:
    def call(x: Any, states: Any, params: Any, *rest: Any) -> Any:
        if isinstance(params, torch.Tensor):  # packed sequences have other arguments
            return theirs(x, states, params, *rest)
        return ours(x, list(states) if isinstance(states, (list, tuple)) else [states], list(params), *rest)

    return call


def _dense(torch: Any, embedding: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        """Optimizers here take no sparse gradients; the numbers are the same."""
        return embedding(*args[:6], **{**kwargs, "sparse": False})

    return call


def _bags(torch: Any) -> Callable[..., Any]:
    def embedding_bag(
        input: Any, weight: Any, offsets: Any = None, max_norm: Any = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
        include_last_offset: bool = False, padding_idx: int | None = None,
    ) -> Any:  # fmt: skip
        if input.dim() != 2 or max_norm is not None:
            raise InputError(
                "an EmbeddingBag takes rows of equal length here: pad them (padding_idx), without max_norm"
            )
        rows = torch.nn.functional.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
        rows = rows if per_sample_weights is None else rows * per_sample_weights[..., None]
        counts = torch.ones_like(input) if padding_idx is None else (input != padding_idx).to(input.dtype)
        number = counts.sum(1)[:, None]
        if mode == "max":
            found = rows.masked_fill(counts[..., None] == 0, -math.inf).max(1)[0]
            return found.masked_fill(number == 0, 0)
        total = (rows * counts[..., None]).sum(1)
        return total if mode == "sum" else total / number.clamp(min=1)

    return embedding_bag


def _gaussian(torch: Any) -> Callable[..., Any]:
    def gaussian_nll_loss(
        input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
    ) -> Any:  # fmt: skip
        var = var if isinstance(var, torch.Tensor) else torch.full_like(input, var)
        if var.size() != input.size() and input.size()[:-1] == var.size():
            var = var.unsqueeze(-1)
        var = var + (var.clamp(min=eps) - var).detach()
        loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0.0)
        return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss

    return gaussian_nll_loss


def _ctc(torch: Any) -> Callable[..., Any]:
    arguments = "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank)"
    losses = _operator(torch, "ctc", arguments, "Tensor", lambda x, *_: x.new_empty(x.shape[1]), 1)

    def ctc_loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Any:  # fmt: skip
        if targets.dim() != 2 or log_probs.dim() != 3:
            raise InputError("ctc_loss takes [T, B, C] and targets of [B, S] here: pad the targets")
        lengths = [torch.as_tensor(each, device=log_probs.device) for each in (input_lengths, target_lengths)]
        found = losses(log_probs, targets, *lengths, blank)
        found = torch.where(found == math.inf, torch.zeros_like(found), found) if zero_infinity else found
        mean = (found / lengths[1].clamp(min=1).to(found.dtype)).mean()
        return mean if reduction == "mean" else found.sum() if reduction == "sum" else found

    return ctc_loss


def _by_columns(function: Any) -> Callable[..., Any]:
    """Of a matrix in rows torch saves the factors of its transpose, in columns its own: those are saved here."""
    return lambda a, *rest, **more: function(a.mT.contiguous().mT, *rest, **more)


def _attended(q: Any, k: Any, v: Any, *_: Any) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _cells(x: Any, states: Any, params: Any, *rest: Any) -> Any:
    ways = 1 + rest[4]
    return (x.new_empty((*x.shape[:2], ways * states[0].shape[-1])), *(each.clone() for each in states))


def _operator(torch: Any, name: str, arguments: str, results: str, shapes: Callable[..., Any], tensors: int) -> Any:
    """An operator and its backward pass, `NAME_backward`: result, gradients of all results, arguments → gradients.

    The gradients are those of its first arguments, as many as `tensors`, flat; an absent one has none.
    """

    def never(*_: Any) -> Any:
        raise NotImplementedError(f"tpuswarm::{name} is recorded, never run")

    backward = torch.library.custom_op(
        f"tpuswarm::{name}_backward", never, mutates_args=(),
        schema=f"(Tensor result, Tensor[] gradients, {arguments[1:]} -> Tensor[]",
    )  # fmt: skip
    backward.register_fake(
        lambda result, gradients, *args: [torch.empty_like(each) for each in _differentiated(torch, args[:tensors])]
    )
    forward = torch.library.custom_op(f"tpuswarm::{name}", never, mutates_args=(), schema=f"{arguments} -> {results}")
    forward.register_fake(shapes)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        flat, ctx.structure = torch.utils._pytree.tree_flatten((output, inputs))
        ctx.save_for_backward(*(each for each in flat if isinstance(each, torch.Tensor)))
        ctx.others = [None if isinstance(each, torch.Tensor) else (each,) for each in flat]

    def differentiate(ctx: Any, *gradients: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        flat = [next(saved) if each is None else each[0] for each in ctx.others]
        output, inputs = torch.utils._pytree.tree_unflatten(flat, ctx.structure)
        first = output if isinstance(output, torch.Tensor) else output[0]
        found = iter(backward(first, list(gradients), *inputs))
        return tuple(_like(torch, each, found) for each in inputs[:tensors]) + (None,) * (len(inputs) - tensors)

    forward.register_autograd(differentiate, setup_context=keep)
    return forward


def _differentiated(torch: Any, args: Any) -> list[Any]:
    flat = torch.utils._pytree.tree_leaves(list(args))
    return [each for each in flat if isinstance(each, torch.Tensor) and each.is_floating_point()]


def _like(torch: Any, argument: Any, found: Any) -> Any:
    """The gradients of an argument: a tensor, a list of them, or none."""
    if isinstance(argument, (list, tuple)):
        return [_like(torch, each, found) for each in argument]
    return next(found) if isinstance(argument, torch.Tensor) and argument.is_floating_point() else None
