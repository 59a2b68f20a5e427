"""Replace functions of torch by operators of our own while a step is traced. Needs torch.

Attention, recurrent layers and CTC become one custom operator each, with a second one for the backward pass, because
JAX has implementations of its own. Other functions are replaced by equal ones whose operations do not depend on data.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tpuswarm.errors import InputError

RECURRENT = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
"""Number of states of each recurrent layer."""
ATTENTION_ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout, bool causal, float? scale, bool groups)"
)
RECURRENT_ARGUMENTS = (
    "(Tensor x, Tensor[] states, Tensor[] params, bool biases, int layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first)"
)
CTC_ARGUMENTS = "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank)"


@functools.cache
def replacements() -> dict[Any, Callable[..., Any]]:
    """Return the replacement of each function of torch."""
    attention = _custom_op("attention", ATTENTION_ARGUMENTS, "Tensor", _attention_shape, 4)
    losses = _custom_op("ctc", CTC_ARGUMENTS, "Tensor", lambda x, *_: x.new_empty(x.shape[1]), 1)

    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    replaced: dict[Any, Callable[..., Any]] = {
        functional.scaled_dot_product_attention: scaled_dot_product_attention,
        functional.embedding: _dense_embedding,
        functional.embedding_bag: _embedding_bag,
        functional.gaussian_nll_loss: _gaussian_nll_loss,
        functional.ctc_loss: functools.partial(_ctc_loss, losses),
        functional.rrelu: _rrelu,
        torch._weight_norm: _weight_norm,
        torch.cdist: _cdist,
        torch.pdist: _pdist,
        torch.linalg.lstsq: _lstsq,
    }
    methods = {"bincount": _bincount, "corrcoef": _corrcoef, "cov": _cov, "repeat_interleave": _repeat_interleave}
    for name, function in methods.items():
        replaced |= {getattr(torch, name): function, getattr(torch.Tensor, name): function}
    for function in torch.linalg.det, torch.linalg.slogdet, torch.linalg.solve, torch.det, torch.slogdet, torch.logdet:
        replaced[function] = functools.partial(_column_major, function)
    for name, states in RECURRENT.items():
        results = ", ".join(["Tensor"] * (1 + states))
        layer = _custom_op(name, RECURRENT_ARGUMENTS, f"({results})", _recurrent_shapes, 3)
        replaced[getattr(torch, name)] = functools.partial(_recurrent, getattr(torch, name), layer)
    return replaced


def _recurrent(original: Any, custom: Any, x: Any, states: Any, params: Any, *args: Any) -> Any:
    if isinstance(params, torch.Tensor):  # packed sequences have other arguments
        return original(x, states, params, *args)
    return custom(x, list(states) if isinstance(states, (list, tuple)) else [states], list(params), *args)


def _dense_embedding(*args: Any, **kwargs: Any) -> Any:
    return functional.embedding(*args[:6], **{**kwargs, "sparse": False})  # optimizers here need dense gradients


def _cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str | None = None) -> Any:
    return _lengths(x1[..., :, None, :] - x2[..., None, :, :], p)


def _pdist(input: Any, p: float = 2.0) -> Any:
    first, second = torch.triu_indices(len(input), len(input), 1)
    return _lengths(input[first] - input[second], p)


def _lengths(differences: Any, p: float) -> Any:
    if p != math.inf:
        return torch.linalg.vector_norm(differences, p, -1)
    sizes = differences.abs()
    largest = sizes.detach().amax(-1, keepdim=True)  # each of several has the whole gradient
    return largest[..., 0] + ((sizes - sizes.detach()) * (sizes == largest)).sum(-1)


def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _rrelu(
    input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Any:  # fmt: skip
    slopes = torch.empty_like(input).uniform_(lower, upper) if training else (lower + upper) / 2
    y = torch.where(input > 0, input, input * slopes)
    return input.copy_(y) if inplace else y


def _bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Count numbers below `minlength`; torch's own result is longer if there are larger ones."""
    if not minlength:
        raise InputError("the length of a bincount depends on the data; give it a minlength above all numbers")
    counted = torch.ones_like(input, dtype=torch.int64) if weights is None else weights
    return counted.new_zeros(minlength).scatter_add(0, input.long(), counted)


def _repeat_interleave(input: Any, repeats: Any = None, dim: int | None = None, *, output_size: Any = None) -> Any:
    if not isinstance(repeats, torch.Tensor):
        args = (input,) if repeats is None else (input, repeats, dim)
        return torch.repeat_interleave(*args, output_size=output_size)
    if output_size is None:
        raise InputError("the length of repeat_interleave by a tensor depends on the data; give it an output_size")
    x, dim = (input.flatten(), 0) if dim is None else (input, dim)
    ends = repeats.expand(x.shape[dim]).cumsum(0)
    return x.index_select(dim, torch.searchsorted(ends, torch.arange(output_size), right=True))


def _cov(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Return the covariances of rows without torch's checks of values. Weights are left to torch."""
    if fweights is not None or aweights is not None:
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    x = input.view(1, -1) if input.dim() < 2 else input
    x = x - x.mean(1, keepdim=True)
    return (x @ x.mH / max(x.shape[1] - correction, 0)).squeeze()


def _corrcoef(input: Any) -> Any:
    cov = _cov(input)
    if not cov.dim():
        return cov / cov
    std = cov.diag().sqrt()
    return (cov / std[:, None] / std).clip(-1, 1)


def _embedding_bag(
    input: Any, weight: Any, offsets: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    if max_norm is not None:
        raise InputError("EmbeddingBag writes into its weight if it has a max_norm; leave max_norm out")
    padding_idx = None if padding_idx is None else padding_idx % len(weight)
    if input.dim() == 2:
        offsets, include_last_offset = torch.arange(len(input)) * input.shape[1], False
    ids = input.flatten()
    rows = functional.embedding(ids, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    rows = rows if per_sample_weights is None else rows * per_sample_weights.flatten()[:, None]
    is_used = torch.ones_like(ids) if padding_idx is None else (ids != padding_idx).to(ids.dtype)
    bags, positions = len(offsets) - include_last_offset, torch.arange(len(ids))
    bag_of = torch.searchsorted(offsets[:bags].contiguous(), positions, right=True) - 1
    bag_size = is_used.new_zeros(bags).index_add(0, bag_of, is_used)[:, None]
    if mode != "max":
        total = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag_of, rows * is_used[:, None])
        return total if mode == "sum" else total / bag_size.clamp(min=1)
    rows = rows.masked_fill(is_used[:, None] == 0, -math.inf)
    with torch.no_grad():  # the first of equal elements gets the gradient
        index = bag_of[:, None].expand_as(rows)
        largest = rows.new_full((bags, rows.shape[1]), -math.inf).scatter_reduce(0, index, rows, "amax")
        place = torch.where(rows == largest[bag_of], positions[:, None], len(ids) - 1)
        first = place.new_full(largest.shape, len(ids) - 1).scatter_reduce(0, index, place, "amin")
    return rows.gather(0, first).masked_fill(bag_size == 0, 0)


def _lstsq(a: Any, b: Any, rcond: Any = None, *, driver: str | None = None) -> Any:
    x = b[..., None] if b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1]) else b
    driver, none = driver or "gelsy", a.new_zeros(0)
    solution = torch.linalg.pinv(a, rtol=rcond) @ x
    has_residuals = a.shape[-2] > a.shape[-1] and driver != "gelsy"
    residuals = (a @ solution - x).abs().square().sum(-2) if has_residuals else none
    rank = none.long() if driver == "gels" else torch.linalg.matrix_rank(a, rtol=rcond)
    values = torch.linalg.svdvals(a.detach()) if driver in ("gelss", "gelsd") else none
    solution = solution if x is b else solution.squeeze(-1)
    return torch.return_types.linalg_lstsq((solution, residuals, rank, values))


def _gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:  # fmt: skip
    var = var if isinstance(var, torch.Tensor) else torch.full_like(input, var)
    if var.size() != input.size() and input.size()[:-1] == var.size():
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0.0)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _ctc_loss(
    losses_op: Any, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Any:  # fmt: skip
    if targets.dim() != 2 or log_probs.dim() != 3:
        raise InputError("ctc_loss needs log_probs of [T, B, C] and targets of [B, S]; pad the targets")
    lengths = [torch.as_tensor(value, device=log_probs.device) for value in (input_lengths, target_lengths)]
    losses = losses_op(log_probs, targets, *lengths, blank)
    losses = torch.where(losses == math.inf, torch.zeros_like(losses), losses) if zero_infinity else losses
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses


def _column_major(function: Any, a: Any, *args: Any, **kwargs: Any) -> Any:
    return function(a.mT.contiguous().mT, *args, **kwargs)  # torch factors the transpose of a row-major matrix


def _attention_shape(q: Any, k: Any, v: Any, *_: Any) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _recurrent_shapes(x: Any, states: Any, params: Any, *args: Any) -> Any:
    directions = 1 + args[4]
    return (x.new_empty((*x.shape[:2], directions * states[0].shape[-1])), *(state.clone() for state in states))


def _never_run(*_: Any) -> Any:
    raise NotImplementedError("tpuswarm's operators are traced, never run")


def _custom_op(name: str, arguments: str, results: str, fake: Callable[..., Any], num_differentiable: int) -> Any:
    """Register an operator and `NAME_backward`, which takes a result, gradients of all results, and the arguments.

    The backward operator returns a flat list: the gradients of the float tensors in the first `num_differentiable`
    arguments.
    """
    backward = torch.library.custom_op(
        f"tpuswarm::{name}_backward", _never_run, mutates_args=(),
        schema=f"(Tensor result, Tensor[] gradients, {arguments[1:]} -> Tensor[]",
    )  # fmt: skip
    backward.register_fake(
        lambda result, gradients, *args: [
            torch.empty_like(leaf) for leaf in tree_leaves(list(args[:num_differentiable])) if _is_float(leaf)
        ]
    )
    schema = f"{arguments} -> {results}"
    forward = torch.library.custom_op(f"tpuswarm::{name}", _never_run, mutates_args=(), schema=schema)
    forward.register_fake(fake)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        leaves, ctx.structure = tree_flatten((output, inputs))
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        ctx.others = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]

    def differentiate(ctx: Any, *gradients: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        leaves = [next(saved) if other is None else other[0] for other in ctx.others]
        output, inputs = tree_unflatten(leaves, ctx.structure)
        result = output if isinstance(output, torch.Tensor) else output[0]
        flat = iter(backward(result, list(gradients), *inputs))
        leaves, structure = tree_flatten(list(inputs[:num_differentiable]))
        differentiated = tree_unflatten([next(flat) if _is_float(leaf) else None for leaf in leaves], structure)
        return (*differentiated, *[None] * (len(inputs) - num_differentiable))

    forward.register_autograd(differentiate, setup_context=save)
    return forward


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
