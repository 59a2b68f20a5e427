"""An exported StyleGAN2 makes our pictures in torch, by what its own config.json says in words."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tpuswarm.recipes.stylegan2 import generator
from tpuswarm.recipes.stylegan2.fold import Form
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.recipe import Options

torch = pytest.importorskip("torch")
functional = torch.nn.functional


def leaky(x):
    return functional.leaky_relu(x, 0.2) * 2**0.5


def filtered(x, gain, around):
    """The filter along both axes, of a picture with zeros around it."""
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    kernel = (taps[:, None] * taps * gain).expand(x.shape[1], 1, 4, 4)
    return functional.conv2d(functional.pad(x, around), kernel, groups=x.shape[1])


def twice(x):
    """Zeros between the pixels, then the filter."""
    between = torch.zeros(*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])
    between[:, :, ::2, ::2] = x
    return filtered(between, 4, (2, 1, 2, 1))


def modulated(x, w, at, weights, up=False, demodulate=True):
    """A kernel of its own for each picture."""
    style = w @ weights[f"{at}.style.weight"].T + weights[f"{at}.style.bias"]
    made = []
    for picture, scale in zip(x, style, strict=True):
        kernel = weights[f"{at}.weight"] * scale[None, :, None, None]
        if demodulate:
            kernel = kernel * (kernel.square().sum((1, 2, 3), keepdim=True) + 1e-8).rsqrt()
        if up:
            grown = functional.conv_transpose2d(picture[None], kernel.flip(2, 3).transpose(0, 1), stride=2)
            made.append(filtered(grown, 4, (1, 1, 1, 1)))
        else:
            made.append(functional.conv2d(picture[None], kernel, padding=kernel.shape[-1] // 2))
    return torch.cat(made)


def pictures(weights, about, z, truncation):
    w = z * (z.square().mean(-1, keepdim=True) + 1e-8).rsqrt()
    for layer in range(about["mapping"]):
        at = f"generator.mapping.{layer}"
        w = leaky(w @ weights[f"{at}.weight"].T + weights[f"{at}.bias"])
    w = weights["w_mean"] + (w - weights["w_mean"]) * truncation
    x = weights["generator.constant"].expand(len(z), -1, -1, -1)
    picture, resolution = None, 4
    while resolution <= about["resolution"]:
        block = f"generator.blocks.{resolution}"
        for name in ("up", "same"):
            if f"{block}.{name}.weight" in weights:
                x = modulated(x, w, f"{block}.{name}", weights, up=name == "up")
                x = leaky(x + weights[f"{block}.{name}.bias"][:, None, None])
        rgb = modulated(x, w, f"{block}.rgb", weights, demodulate=False) + weights[f"{block}.rgb.bias"][:, None, None]
        picture = rgb if picture is None else twice(picture) + rgb
        resolution *= 2
    return picture


def test_what_is_exported_makes_the_same_pictures_in_torch(tmp_path):
    recipe = StyleGAN2(resolution=16, latent=8, mapping=2, channels=4, most_channels=8, group=2)
    state = recipe.program(Options()).init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))  # biases and strengths of noise are not what they began as
    leaves = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    state = jax.tree.unflatten(tree, leaves)
    recipe.export(state, tmp_path)
    weights = {name: torch.from_numpy(each) for name, each in load_file(tmp_path / "model.safetensors").items()}
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["resolution"] == 16 and "moving average" in about["words"]["generator"]
    z = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    w = generator.truncate(generator.to_w(state.average, jnp.asarray(z)), state.w_mean, 0.7)
    ours = generator.synthesize(state.average, generator.in_layers(w, recipe.config), None, recipe.config, Form())
    theirs = pictures(weights, about, torch.from_numpy(z), 0.7).numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert {name.split(".")[0] for name in weights} == {"generator", "discriminator", "w_mean"}
