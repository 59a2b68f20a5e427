"""LSTM, GRU and plain recurrent layers: one loop over time, compiled once, however long the sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tpuswarm.torch.ops.randoms import dropout as dropped
from tpuswarm.train.recipe import Options

Cell = Callable[..., Any]
"""(state, projected input, hidden weights, hidden bias, of an LSTM the projection of its output) → state."""


def _lstm(state: Any, x: Any, w: Any, b: Any, down: Any = None) -> Any:
    h, c = state
    i, f, g, o = jnp.split(x + h @ w.T + b, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h if down is None else h @ down.T, c


def _gru(state: Any, x: Any, w: Any, b: Any) -> Any:
    (h,) = state
    xr, xz, xn = jnp.split(x, 3, axis=-1)
    hr, hz, hn = jnp.split(h @ w.T + b, 3, axis=-1)
    z = jax.nn.sigmoid(xz + hz)
    return ((1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h,)


def _plain(activation: Callable[[Any], Any]) -> Cell:
    return lambda state, x, w, b: (activation(x + state[0] @ w.T + b),)


def _layer(
    cell: Cell, x: Any, state: tuple[Any, ...], weights: Sequence[Any], has_biases: bool, reverse: bool
) -> tuple[Any, Any]:
    """x [T, B, C]; the outputs of all times and the last state."""
    w_in, w_hidden, *biases = weights[: 4 if has_biases else 2]
    down = weights[4 if has_biases else 2 :]
    projected = x @ w_in.T.astype(x.dtype) + (biases[0].astype(x.dtype) if biases else 0)
    bias = biases[1] if biases else jnp.zeros(())

    def step(state: Any, x: Any) -> tuple[Any, Any]:  # in 16 bits within the loop: their gradients are summed in 32
        state = cell(state, x, *(each.astype(x.dtype) for each in (w_hidden, bias, *down)))
        return state, state[0]

    last, out = lax.scan(step, state, projected, reverse=reverse)
    return out, last


def _recurrent(cell: Cell, states: int) -> Callable[..., Any]:
    def apply(
        key: jax.Array | None, options: Options, x: Any, given: Sequence[Any], params: Sequence[Any], has_biases: bool,
        layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        x = x.astype(jnp.bfloat16) if options.precision == "bf16" else x
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        ways = 2 if bidirectional else 1
        each = len(params) // (layers * ways)
        ends: list[tuple[Any, ...]] = []
        for layer in range(layers):
            outs = []
            for way in range(ways):
                at = layer * ways + way
                state = tuple(one[at].astype(x.dtype) for one in given)
                out, last = _layer(cell, x, state, params[at * each : (at + 1) * each], has_biases, way == 1)
                outs.append(out)
                ends.append(last)
            x = jnp.concatenate(outs, axis=-1) if ways > 1 else outs[0]
            if dropout and train and key is not None and layer < layers - 1:
                x, _ = dropped(jax.random.fold_in(key, layer), x, dropout)
        last_states = [jnp.stack([end[which] for end in ends]) for which in range(states)]
        return (jnp.swapaxes(x, 0, 1) if batch_first else x, *last_states)

    return apply


def ctc(
    key: jax.Array | None, options: Options, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any,
    blank: int,
) -> Any:  # fmt: skip
    """The CTC loss of each sequence: log_probs [T, B, C], targets [B, S]; infinite where it is impossible."""
    times, count = log_probs.shape[0], targets.shape[1]
    logits = jnp.swapaxes(log_probs, 0, 1)
    late = jnp.arange(times)[None] >= input_lengths[:, None]
    absent = jnp.arange(count)[None] >= target_lengths[:, None]
    loss = optax.ctc_loss(logits, late.astype(jnp.float32), targets, absent.astype(jnp.float32), blank_id=blank)
    return jnp.where(loss > 5e4, jnp.inf, loss)


WHOLE: dict[str, Callable[..., Any]] = {
    "tpuswarm.ctc": ctc,
    "tpuswarm.lstm": _recurrent(_lstm, 2), "tpuswarm.gru": _recurrent(_gru, 1),
    "tpuswarm.rnn_tanh": _recurrent(_plain(jnp.tanh), 1), "tpuswarm.rnn_relu": _recurrent(_plain(jax.nn.relu), 1),
}  # fmt: skip
"""By name; each has a key first, None in evaluation, and the options."""
