"""The shapes of published models in the catalog."""

import math

import pytest

from tpuswarm import recipes
from tpuswarm.catalog import public_models
from tpuswarm.recipes.decoder.architecture import parse_config
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.decoder.weights import tensors


def test_twenty_models_have_the_known_counts_of_parameters():
    """A wrong width, number of layers or bias, and a head that is wrongly tied, change the count."""
    models = public_models()
    assert len(models) == 20 and [*models] == sorted(models, key=lambda name: models[name].parameters)
    for model in models.values():
        shapes = tensors(parse_config(model.config, model.name))
        assert sum(math.prod(tensor.shape) for tensor in shapes) == model.parameters, model.name
        assert model.source.url.startswith("https://github.com/") and model.repository.count("/") == 1


@pytest.mark.parametrize("name", public_models())
def test_model_is_a_recipe_without_weights_and_data(name):
    target, options = recipes.find(name.upper())
    assert target.endswith("decoder.recipe:Decoder")
    recipe = Decoder(**options, lora=16)
    assert recipe.vocab == public_models()[name].config["vocab_size"] and recipe.context == 2048
    assert recipe.data("train").rows(0, 1)["tokens"].shape == (1, 2049)
