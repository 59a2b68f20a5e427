"""StyleGAN2 beside torch: both networks, their losses and regularisers with every gradient, and an exported generator.

The second implementation reads weights as exported files name them: kernels of each picture's own, one group after the
other. In double precision, every gradient is by torch's autograd.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tpuswarm.recipes.stylegan2 import discriminator, generator
from tpuswarm.recipes.stylegan2.config import Config
from tpuswarm.recipes.stylegan2.layers import Form
from tpuswarm.recipes.stylegan2.program import fake_loss, path_lengths, r1_penalty, real_loss
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.recipe import Options

torch = pytest.importorskip("torch")
functional = torch.nn.functional

SHAPE = {"resolution": 16, "latent": 6, "mapping": 2, "channels": 3, "most_channels": 5, "group": 2}
CONFIG = Config(**SHAPE)
COUNT = 4
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def named(prefix, params):
    """Tensors of a network by their names in an exported file, as functions of the parameters."""
    found = {}
    for name, layer in params.items():
        path = f"{prefix}.{name}"
        if not isinstance(layer, dict):
            found[path] = layer.permute(2, 0, 1) if layer.ndim == 3 else layer
            continue
        if "w" in layer:
            rate = 0.01 if prefix.endswith(".mapping") else 1.0
            w = layer["w"] / np.prod(layer["w"].shape[:-1]) ** 0.5 * rate
            if path == "discriminator.last.dense":
                w = w.reshape(4, 4, -1, w.shape[-1]).permute(2, 0, 1, 3).flatten(0, 2)
            found[f"{path}.weight"] = w.permute(3, 2, 0, 1) if w.ndim == 4 else w.T
            if "b" in layer:
                found[f"{path}.bias"] = layer["b"] * rate
        found |= named(path, {key: value for key, value in layer.items() if key not in ("w", "b")})
    return found


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


def double(tree, requires_grad=False):
    return jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf, np.float64), requires_grad=requires_grad), tree)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def perturbed(params):
    """Biases and noise strengths begin at 0, where a wrong one would not be seen."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [leaf + 0.3 * normal(seed, *leaf.shape) for seed, leaf in enumerate(leaves)])


G_PARAMS, D_PARAMS = (
    perturbed(jax.jit(network.init, static_argnums=1)(jax.random.key(0), CONFIG))
    for network in (generator, discriminator)
)
Z, W = normal(0, COUNT, CONFIG.latent), normal(1, COUNT, CONFIG.layers, CONFIG.latent)
PICTURES, NOISE = (normal(seed, COUNT, CONFIG.resolution, CONFIG.resolution, 3) for seed in (2, 3))
MEAN_LENGTH = 0.3


def planes(pictures):
    return torch.tensor(pictures.transpose(0, 3, 1, 2).astype(np.float64))


def our_losses(form):
    """The parameters and the loss of each kind, in one form of our networks."""

    def our_score(params, x):
        return discriminator.score(params, x, CONFIG, form)

    def pictures_of(params, w):
        return generator.synthesize(params, w, None, CONFIG, form)

    def made(params):
        return pictures_of(params, generator.in_layers(generator.to_w(params, Z), CONFIG))

    def path(params):
        length_B = path_lengths(lambda w: pictures_of(params, w), jnp.asarray(W), jnp.asarray(NOISE))
        return jnp.square(length_B - MEAN_LENGTH).mean()

    return {
        "generator": (G_PARAMS, lambda params: real_loss(our_score(D_PARAMS, made(params)))),
        "discriminator": (
            D_PARAMS,
            lambda params: real_loss(our_score(params, PICTURES)) + fake_loss(our_score(params, made(G_PARAMS))),
        ),
        "r1": (D_PARAMS, lambda params: r1_penalty(lambda x: our_score(params, x), jnp.asarray(PICTURES))),
        "path lengths": (G_PARAMS, path),
    }


def their_loss(kind, params):
    """The same loss in torch."""
    fixed_g, fixed_d = named("generator", double(G_PARAMS)), named("discriminator", double(D_PARAMS))
    weights = named("generator" if params.keys() == G_PARAMS.keys() else "discriminator", params)

    def made(weights):
        return synthesize(weights, to_w(weights, double(Z))[:, None].expand(-1, CONFIG.layers, -1))

    if kind == "generator":
        return functional.softplus(-score(fixed_d, made(weights))).mean()
    if kind == "discriminator":
        real, fake = score(weights, planes(PICTURES)), score(weights, made(fixed_g))
        return functional.softplus(-real).mean() + functional.softplus(fake).mean()
    if kind == "r1":
        x = planes(PICTURES).requires_grad_()
        (slope,) = torch.autograd.grad(score(weights, x).sum(), x, create_graph=True)
        return slope.square().sum((1, 2, 3)).mean()
    codes = double(W, requires_grad=True)
    projected = (synthesize(weights, codes) * planes(NOISE)).sum() / CONFIG.resolution
    (slope,) = torch.autograd.grad(projected, codes, create_graph=True)
    return (slope.square().sum(2).mean(1).sqrt() - MEAN_LENGTH).square().mean()


@pytest.mark.parametrize("form", [Form(), Form(folds=True)], ids=["plain", "folded"])
@pytest.mark.parametrize("kind", ["generator", "discriminator", "r1", "path lengths"])
def test_losses_and_their_gradients_are_torchs(kind, form):
    params, loss = our_losses(form)[kind]
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    leaves, tree = jax.tree.flatten(double(params, requires_grad=True))
    expected = their_loss(kind, jax.tree.unflatten(tree, leaves))
    assert float(value) == pytest.approx(float(expected.detach()), rel=1e-4)
    slopes = torch.autograd.grad(expected, leaves, allow_unused=True, materialize_grads=True)
    largest = max(slope.abs().max() for slope in slopes)
    for (path, grad), slope in zip(jax.tree.leaves_with_path(grads), slopes, strict=True):
        np.testing.assert_allclose(grad, slope, 1e-4, 1e-4 * float(largest), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("form", [Form(), Form(folds=True)], ids=["plain", "folded"])
def test_pictures_are_torchs(form):
    found = jax.jit(lambda params, w: generator.synthesize(params, w, None, CONFIG, form))(G_PARAMS, W)
    expected = synthesize(named("generator", double(G_PARAMS)), double(W))
    np.testing.assert_allclose(found.transpose(0, 3, 1, 2), expected, **CLOSE)


@pytest.mark.long
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

    ours, our_scores = jax.jit(pictures_and_scores)(state, Z, PICTURES)
    w = weights["w_mean"] + (to_w(weights, torch.from_numpy(Z)) - weights["w_mean"]) * 0.7
    theirs = synthesize(weights, w[:, None].expand(-1, CONFIG.layers, -1))
    np.testing.assert_allclose(ours.transpose(0, 3, 1, 2), theirs, **CLOSE)
    np.testing.assert_allclose(our_scores, score(weights, planes(PICTURES).float()), **CLOSE)
