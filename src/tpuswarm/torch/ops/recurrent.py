"""LSTM, GRU and plain recurrent layers as one loop over time, compiled once for any length; CTC."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tpuswarm.torch.ops.random_numbers import dropout
from tpuswarm.train.recipe import Options

Cell = Callable[..., Any]
"""(state, projected input, hidden weights, hidden bias, LSTM's output projection if any) → new state."""


def _lstm(state: Any, x: Any, w: Any, b: Any, projection: Any = None) -> Any:
    h, c = state
    i, f, g, o = jnp.split(x + h @ w.T + b, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h if projection is None else h @ projection.T, c


def _gru(state: Any, x: Any, w: Any, b: Any) -> Any:
    (h,) = state
    xr, xz, xn = jnp.split(x, 3, axis=-1)
    hr, hz, hn = jnp.split(h @ w.T + b, 3, axis=-1)
    z = jax.nn.sigmoid(xz + hz)
    return ((1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h,)


def _rnn(activation: Callable[[Any], Any]) -> Cell:
    return lambda state, x, w, b: (activation(x + state[0] @ w.T + b),)


def _layer(
    cell: Cell, x: Any, state: tuple[Any, ...], weights: Sequence[Any], has_biases: bool, reverse: bool
) -> tuple[Any, Any]:
    """Return the outputs of x [T, B, C] at all times and the last state."""
    w_in, w_hidden, *biases = weights[: 4 if has_biases else 2]
    projection = weights[4 if has_biases else 2 :]
    projected = x @ w_in.T.astype(x.dtype) + (biases[0].astype(x.dtype) if biases else 0)
    bias = biases[1] if biases else jnp.zeros(())

    def step(state: Any, x: Any) -> tuple[Any, Any]:  # cast inside the loop, so that gradients are summed in float32
        state = cell(state, x, *(array.astype(x.dtype) for array in (w_hidden, bias, *projection)))
        return state, state[0]

    last, outputs = lax.scan(step, state, projected, reverse=reverse)
    return outputs, last


def _recurrent(cell: Cell) -> Callable[..., Any]:
    def apply(
        key: jax.Array | None, options: Options, x: Any, states: Sequence[Any], params: Sequence[Any], has_biases: bool,
        layers: int, dropout_p: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        x = x.astype(jnp.bfloat16) if options.precision == "bf16" else x
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        directions = 2 if bidirectional else 1
        params_per_layer = len(params) // (layers * directions)
        last_states: list[tuple[Any, ...]] = []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                at = layer * directions + direction
                state = tuple(array[at].astype(x.dtype) for array in states)
                weights = params[at * params_per_layer : (at + 1) * params_per_layer]
                output, last = _layer(cell, x, state, weights, has_biases, direction == 1)
                outputs.append(output)
                last_states.append(last)
            x = jnp.concatenate(outputs, axis=-1)
            if dropout_p and train and key is not None and layer < layers - 1:
                x, _ = dropout(jax.random.fold_in(key, layer), x, dropout_p)
        return (jnp.swapaxes(x, 0, 1) if batch_first else x, *map(jnp.stack, zip(*last_states, strict=True)))

    return apply


def _ctc(
    key: jax.Array | None, options: Options, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any,
    blank: int,
) -> Any:  # fmt: skip
    """Return the loss of each sequence, infinite if impossible: log_probs [T, B, C], targets [B, S]."""

    def padding(length: int, lengths: Any) -> Any:
        return (jnp.arange(length)[None] >= lengths[:, None]).astype(jnp.float32)

    input_padding = padding(log_probs.shape[0], input_lengths)
    target_padding = padding(targets.shape[1], target_lengths)
    logits = jnp.swapaxes(log_probs, 0, 1)
    loss = optax.ctc_loss(logits, input_padding, targets, target_padding, blank_id=blank)
    return jnp.where(loss > 5e4, jnp.inf, loss)


DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "tpuswarm.ctc": _ctc, "tpuswarm.lstm": _recurrent(_lstm), "tpuswarm.gru": _recurrent(_gru),
    "tpuswarm.rnn_tanh": _recurrent(_rnn(jnp.tanh)), "tpuswarm.rnn_relu": _recurrent(_rnn(jax.nn.relu)),
}  # fmt: skip
