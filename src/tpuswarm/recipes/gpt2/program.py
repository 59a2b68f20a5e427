"""The training program of GPT-2."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from tpuswarm.recipes.gpt2 import model
from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.recipes.language.loss import LossOptions, mean_by_set, mean_loss
from tpuswarm.recipes.language.program import Optimizer, language_program
from tpuswarm.train.recipe import Batch, Options
from tpuswarm.train.supervised_program import SupervisedProgram


def gpt2_program(
    config: Config, options: Options, optimizer: Optimizer, set_names: Sequence[str] = ()
) -> SupervisedProgram:
    """Return the program of a GPT-2 of this shape; it supports every option. set_names: of several data sets."""

    def loss(params: model.Params, batch: Batch, key: jax.Array | None, how: LossOptions) -> Any:
        tokens_BxT1 = batch["tokens"]
        x_BxTxD = model.hidden(params, tokens_BxT1[:, :-1], config, options, key)
        mean = partial(mean_loss, x_BxTxD, params["wte"], tokens_BxT1[:, 1:], config.vocab, how)
        if key is None and set_names:
            return mean_by_set(
                lambda counted: mean(counted_BxT=counted), tokens_BxT1[:, 1:] >= 0, batch["set"], set_names
            )
        return mean()

    return language_program(
        lambda key: model.init(key, config),
        loss,
        config.context,
        options,
        optimizer,
        {"wte": "head"},
        set_names=set_names,
    )
