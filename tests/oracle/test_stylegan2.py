"""Exported StyleGAN2 networks make the same pictures and scores in torch.

tests/recipes/test_stylegan2_authors.py compares losses and gradients with the authors' code.
"""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tpuswarm.recipes.stylegan2 import discriminator, generator
from tpuswarm.recipes.stylegan2.config import Config
from tpuswarm.recipes.stylegan2.layers import Form
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.recipe import Options

torch = pytest.importorskip("torch")
functional = torch.nn.functional

SHAPE = {"resolution": 16, "latent": 6, "mapping": 2, "channels": 3, "most_channels": 5, "group": 2}
CONFIG = Config(**SHAPE)
COUNT = 4
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def leaky(x):
    return functional.leaky_relu(x, 0.2) * 2**0.5


def filtered(x, gain, around):
    """The filter along both axes, of a picture with zeros around it."""
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=x.dtype) / 8
    kernel = (taps[:, None] * taps * gain).expand(x.shape[1], 1, 4, 4)
    return functional.conv2d(functional.pad(x, around), kernel, groups=x.shape[1])


def doubled(x):
    """Zeros between the pixels, then the filter."""
    between = torch.zeros(*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3], dtype=x.dtype)
    between[:, :, ::2, ::2] = x
    return filtered(between, 4, (2, 1, 2, 1))


def modulated(x, w, at, weights, up=False, demodulate=True):
    """Convolve each picture with a kernel of its own; add the bias."""
    style = w @ weights[f"{at}.style.weight"].T + weights[f"{at}.style.bias"]
    pictures = []
    for picture, scale in zip(x, style, strict=True):
        kernel = weights[f"{at}.weight"] * scale[None, :, None, None]
        if demodulate:
            kernel = kernel * (kernel.square().sum((1, 2, 3), keepdim=True) + 1e-8).rsqrt()
        if up:
            grown = functional.conv_transpose2d(picture[None], kernel.flip(2, 3).transpose(0, 1), stride=2)
            pictures.append(filtered(grown, 4, (1, 1, 1, 1)))
        else:
            pictures.append(functional.conv2d(picture[None], kernel, padding=kernel.shape[-1] // 2))
    return torch.cat(pictures) + weights[f"{at}.bias"][:, None, None]


def dense(x, at, weights):
    return x @ weights[f"{at}.weight"].T + weights[f"{at}.bias"]


def to_w(weights, z):
    w = z * (z.square().mean(-1, keepdim=True) + 1e-8).rsqrt()
    for layer in range(CONFIG.mapping):
        w = leaky(dense(w, f"generator.mapping.{layer}", weights))
    return w


def synthesize(weights, w_BxLxD):
    x = weights["generator.constant"].expand(len(w_BxLxD), -1, -1, -1)
    picture, layer = None, 0
    for resolution in CONFIG.resolutions:
        block = f"generator.blocks.{resolution}"
        for name in ("up", "same"):
            if f"{block}.{name}.weight" in weights:
                x = leaky(modulated(x, w_BxLxD[:, layer], f"{block}.{name}", weights, up=name == "up"))
                layer += 1
        rgb = modulated(x, w_BxLxD[:, layer], f"{block}.rgb", weights, demodulate=False)
        picture = rgb if picture is None else doubled(picture) + rgb
    return picture


def score(weights, x):
    def convolved(x, at, **how):
        return leaky(functional.conv2d(x, weights[f"{at}.weight"], weights[f"{at}.bias"], **how))

    x = convolved(x, "discriminator.rgb")
    for resolution in CONFIG.resolutions[:0:-1]:
        block = f"discriminator.blocks.{resolution}"
        skip = functional.conv2d(filtered(x, 1, (1, 1, 1, 1))[:, :, ::2, ::2], weights[f"{block}.skip.weight"])
        x = convolved(x, f"{block}.same", padding=1)
        x = (convolved(filtered(x, 1, (2, 2, 2, 2)), f"{block}.down", stride=2) + skip) / 2**0.5
    groups = []
    for group in x.split(CONFIG.group):
        deviation = (group.var(0, correction=0) + 1e-8).sqrt().mean()
        groups.append(torch.cat([group, deviation.expand(len(group), 1, *group.shape[2:])], 1))
    x = convolved(torch.cat(groups), "discriminator.last.same", padding=1)
    return dense(leaky(dense(x.flatten(1), "discriminator.last.dense", weights)), "discriminator.last.score", weights)[
        :, 0
    ]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def perturbed(params):
    """Move biases and noise strengths away from 0, where a wrong one has no effect."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [leaf + 0.3 * normal(seed, *leaf.shape) for seed, leaf in enumerate(leaves)])


def test_exported_networks_are_the_same_in_torch(tmp_path):
    recipe = StyleGAN2(**SHAPE)
    state = perturbed(jax.jit(recipe.program(Options()).init)(jax.random.key(0)))
    recipe.export(state, tmp_path)
    weights = {name: torch.from_numpy(array) for name, array in load_file(tmp_path / "model.safetensors").items()}
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["resolution"] == 16 and "moving average" in about["words"]["generator"]
    assert {name.split(".")[0] for name in weights} == {"generator", "discriminator", "w_mean"}

    def pictures_and_scores(state, z, pictures):
        w = generator.truncate(generator.to_w(state.average, z), state.w_mean, 0.7)
        made = generator.synthesize(state.average, generator.in_layers(w, CONFIG), None, CONFIG, Form())
        return made, discriminator.score(state.discriminator, pictures, CONFIG, Form())

    z, real = normal(0, COUNT, CONFIG.latent), normal(2, COUNT, CONFIG.resolution, CONFIG.resolution, 3)
    ours, our_scores = jax.jit(pictures_and_scores)(state, z, real)
    w = weights["w_mean"] + (to_w(weights, torch.from_numpy(z)) - weights["w_mean"]) * 0.7
    theirs = synthesize(weights, w[:, None].expand(-1, CONFIG.layers, -1))
    np.testing.assert_allclose(ours.transpose(0, 3, 1, 2), theirs, **CLOSE)
    np.testing.assert_allclose(our_scores, score(weights, torch.from_numpy(real).permute(0, 3, 1, 2)), **CLOSE)
