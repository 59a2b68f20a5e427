"""The training program of GPT-2."""

from typing import Any

import jax

from tpuswarm.recipes.gpt2 import model
from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.recipes.language.loss import LossOptions, mean_loss
from tpuswarm.recipes.language.program import Optimizer, language_program
from tpuswarm.train.recipe import Batch, Options
from tpuswarm.train.supervised_program import SupervisedProgram


def gpt2_program(config: Config, options: Options, optimizer: Optimizer) -> SupervisedProgram:
    """Return the program of a GPT-2 of this shape; it supports every option."""

    def loss(params: model.Params, batch: Batch, key: jax.Array | None, how: LossOptions) -> Any:
        tokens_BxT1 = batch["tokens"]
        x_BxTxD = model.hidden(params, tokens_BxT1[:, :-1], config, options, key)
        return mean_loss(x_BxTxD, params["wte"], tokens_BxT1[:, 1:], config.vocab, how)

    return language_program(
        lambda key: model.init(key, config), loss, config.context, options, optimizer, {"wte": "head"}
    )
