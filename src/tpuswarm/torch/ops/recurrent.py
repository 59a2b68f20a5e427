"""LSTM, GRU and plain recurrent layers: one loop over time, compiled once, however long the sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuswarm.torch.ops.randoms import dropout as dropped

Cell = Callable[[Any, Any, Any, Any], Any]
"""(state, projected input, hidden weights, hidden bias) → state."""


def _lstm(state: Any, x: Any, w: Any, b: Any) -> Any:
    h, c = state
    i, f, g, o = jnp.split(x + h @ w.T + b, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(state: Any, x: Any, w: Any, b: Any) -> Any:
    (h,) = state
    xr, xz, xn = jnp.split(x, 3, axis=-1)
    hr, hz, hn = jnp.split(h @ w.T + b, 3, axis=-1)
    z = jax.nn.sigmoid(xz + hz)
    return ((1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h,)


def _plain(activation: Callable[[Any], Any]) -> Cell:
    return lambda state, x, w, b: (activation(x + state[0] @ w.T + b),)


def _layer(cell: Cell, x: Any, state: tuple[Any, ...], weights: Sequence[Any], reverse: bool) -> tuple[Any, Any]:
    """x [T, B, C]; the outputs of all times and the last state."""
    w_in, w_hidden, *biases = weights
    projected = x @ w_in.T + (biases[0] if biases else 0)
    bias = biases[1] if biases else jnp.zeros((), x.dtype)

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        state = cell(state, x, w_hidden, bias)
        return state, state[0]

    last, out = lax.scan(step, state, projected, reverse=reverse)
    return out, last


def _recurrent(cell: Cell, states: int) -> Callable[..., Any]:
    def apply(
        key: jax.Array | None, x: Any, begin: Any, params: Sequence[Any], has_biases: bool, layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        given = list(begin) if states > 1 else [begin]
        each, ways = 4 if has_biases else 2, 2 if bidirectional else 1
        ends: list[tuple[Any, ...]] = []
        for layer in range(layers):
            outs = []
            for way in range(ways):
                at = layer * ways + way
                state = tuple(one[at].astype(x.dtype) for one in given)
                weights = [one.astype(x.dtype) for one in params[at * each : (at + 1) * each]]
                out, last = _layer(cell, x, state, weights, reverse=way == 1)
                outs.append(out)
                ends.append(last)
            x = jnp.concatenate(outs, axis=-1) if ways > 1 else outs[0]
            if dropout and train and key is not None and layer < layers - 1:
                x, _ = dropped(jax.random.fold_in(key, layer), x, dropout)
        last_states = [jnp.stack([end[which] for end in ends]) for which in range(states)]
        return (jnp.swapaxes(x, 0, 1) if batch_first else x, *last_states)

    return apply


OPS: dict[str, Callable[..., Any]] = {
    "lstm": _recurrent(_lstm, 2), "gru": _recurrent(_gru, 1), "rnn_tanh": _recurrent(_plain(jnp.tanh), 1),
    "rnn_relu": _recurrent(_plain(jax.nn.relu), 1),
}  # fmt: skip
"""By name; each has a key first, None in evaluation."""
