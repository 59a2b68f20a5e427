"""Both networks, their losses and regularisers beside torch in double precision: kernels of each picture's own, groups
one after the other, and every gradient by its autograd."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuswarm.recipes.stylegan2 import discriminator, generator, losses
from tpuswarm.recipes.stylegan2.config import Config
from tpuswarm.recipes.stylegan2.fold import Form

torch = pytest.importorskip("torch")
functional = torch.nn.functional

CONFIG = Config(16, latent=6, mapping=2, channels=3, most_channels=5, group=2)
COUNT = 4


def scaled(p, rate=1.0):
    return p["w"] / np.prod(p["w"].shape[:-1]) ** 0.5 * rate


def dense(x, p, rate=1.0):
    return x @ scaled(p, rate) + p["b"] * rate


def leaky(x):
    return functional.leaky_relu(x, 0.2) * 2**0.5


def biased(x, bias):
    return leaky(x + bias[:, None, None])


def filtered(x, gain, around):
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64) / 8
    kernel = (taps[:, None] * taps * gain).expand(x.shape[1], 1, 4, 4)
    return functional.conv2d(functional.pad(x, around), kernel, groups=x.shape[1])


def convolved(x, p, **how):
    return functional.conv2d(x, scaled(p).permute(3, 2, 0, 1), **how)


def modulated(x, w, p, up=False, demodulate=True):
    made = []
    for picture, style in zip(x, dense(w, p["style"]), strict=True):
        kernel = scaled(p).permute(3, 2, 0, 1) * style[None, :, None, None]
        if demodulate:
            kernel = kernel / (kernel.square().sum((1, 2, 3), keepdim=True) + 1e-8).sqrt()
        if up:
            grown = functional.conv_transpose2d(picture[None], kernel.flip(2, 3).transpose(0, 1), stride=2)
            made.append(filtered(grown, 4, (1, 1, 1, 1)))
        else:
            made.append(functional.conv2d(picture[None], kernel, padding=kernel.shape[-1] // 2))
    return torch.cat(made)


def to_w(params, z):
    w = z / (z.square().mean(-1, keepdim=True) + 1e-8).sqrt()
    for layer in range(CONFIG.mapping):
        w = leaky(dense(w, params["mapping"][f"{layer}"], 0.01))
    return w


def synthesize(params, w_BxLxD):
    x = params["constant"].permute(2, 0, 1).expand(len(w_BxLxD), -1, -1, -1)
    picture, index = None, 0
    for resolution in CONFIG.resolutions:
        block = params["blocks"][f"{resolution}"]
        for name in ("up", "same"):
            if name in block:
                x = biased(modulated(x, w_BxLxD[:, index], block[name], up=name == "up"), block[name]["b"])
                index += 1
        rgb = modulated(x, w_BxLxD[:, index], block["rgb"], demodulate=False) + block["rgb"]["b"][:, None, None]
        if picture is not None:
            between = torch.zeros(*picture.shape[:2], resolution, resolution, dtype=torch.float64)
            between[:, :, ::2, ::2] = picture
            rgb = rgb + filtered(between, 4, (2, 1, 2, 1))
        picture = rgb
    return picture


def score(params, x):
    x = biased(convolved(x, params["rgb"]), params["rgb"]["b"])
    for resolution in CONFIG.resolutions[:0:-1]:
        block = params["blocks"][f"{resolution}"]
        skip = convolved(filtered(x, 1, (1, 1, 1, 1))[:, :, ::2, ::2], block["skip"])
        x = biased(convolved(x, block["same"], padding=1), block["same"]["b"])
        x = biased(convolved(filtered(x, 1, (2, 2, 2, 2)), block["down"], stride=2), block["down"]["b"])
        x = (x + skip) / 2**0.5
    groups = []
    for group in x.split(CONFIG.group):
        deviation = (group.var(0, correction=0) + 1e-8).sqrt().mean()
        groups.append(torch.cat([group, deviation.expand(len(group), 1, *group.shape[2:])], 1))
    last = params["last"]
    x = biased(convolved(torch.cat(groups), last["same"], padding=1), last["same"]["b"])
    x = leaky(dense(x.permute(0, 2, 3, 1).flatten(1), last["dense"]))
    return dense(x, last["score"])[:, 0]


def doubled(tree, wanted=False):
    return jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf, np.float64), requires_grad=wanted), tree)


def slopes(loss, params):
    """The loss, and its gradients as arrays in the tree of the parameters."""
    leaves, tree = jax.tree.flatten(params)
    value = loss(params)
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    arrays = [np.zeros(leaf.shape) if each is None else each.numpy() for leaf, each in zip(leaves, found, strict=True)]
    return float(value.detach()), jax.tree.unflatten(tree, arrays)


def same(ours, theirs):
    (value, grads), (wanted, slope) = ours, theirs
    assert float(value) == pytest.approx(wanted, rel=1e-4)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(slope))
    for path, leaf in jax.tree.leaves_with_path(slope):
        mine = dict(jax.tree.leaves_with_path(grads))[path]
        np.testing.assert_allclose(mine, leaf, rtol=1e-4, atol=1e-4 * largest, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def given():
    """Parameters of both networks away from where they begin, codes z and w, pictures and noise."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    keys = jax.random.split(jax.random.key(0), 2)
    params = [
        jax.tree.map(lambda leaf: np.asarray(leaf) + 0.3 * normal(*leaf.shape), each.init(key, CONFIG))
        for each, key in zip((generator, discriminator), keys, strict=True)
    ]
    side = CONFIG.resolution
    pictures, noise = normal(COUNT, side, side, 3), normal(COUNT, side, side, 3)
    return (*params, normal(COUNT, CONFIG.latent), normal(COUNT, CONFIG.layers, CONFIG.latent), pictures, noise)


def planes(pictures):
    return torch.tensor(pictures.transpose(0, 3, 1, 2).astype(np.float64))


@pytest.fixture(params=[Form(), Form(folds=True)], ids=["plain", "folded"])
def ours(request):
    """Score and synthesis in either form."""
    return (
        lambda params, x: discriminator.score(params, x, CONFIG, request.param),
        lambda params, w: generator.synthesize(params, w, None, CONFIG, request.param),
    )


def test_both_losses_and_their_gradients_are_torchs(given, ours):
    our_score, our_synthesis = ours
    g_params, d_params, z, _, pictures, _ = given

    def made(params):
        return our_synthesis(params, generator.in_layers(generator.to_w(params, z), CONFIG))

    def g_loss(params):
        return losses.real(our_score(d_params, made(params)))

    def d_loss(params):
        return losses.real(our_score(params, pictures)) + losses.fake(our_score(params, made(g_params)))

    def their_made(params):
        w = to_w(params, torch.tensor(z.astype(np.float64)))
        return synthesize(params, w[:, None].expand(-1, CONFIG.layers, -1))

    fixed_g, fixed_d = doubled(g_params), doubled(d_params)
    np.testing.assert_allclose(made(g_params).transpose(0, 3, 1, 2), their_made(fixed_g), rtol=1e-4, atol=1e-4)

    def their_g(params):
        return functional.softplus(-score(fixed_d, their_made(params))).mean()

    def their_d(params):
        real, fake = score(params, planes(pictures)), score(params, their_made(fixed_g))
        return functional.softplus(-real).mean() + functional.softplus(fake).mean()

    same(jax.jit(jax.value_and_grad(g_loss))(g_params), slopes(their_g, doubled(g_params, True)))
    same(jax.jit(jax.value_and_grad(d_loss))(d_params), slopes(their_d, doubled(d_params, True)))


def test_r1_and_its_gradient_are_torchs(given, ours):
    our_score, _ = ours
    _, d_params, _, _, pictures, _ = given

    def theirs(params):
        x = planes(pictures).requires_grad_()
        (slope,) = torch.autograd.grad(score(params, x).sum(), x, create_graph=True)
        return slope.square().sum((1, 2, 3)).mean()

    def our_r1(params):
        return losses.r1(lambda x: our_score(params, x), jnp.asarray(pictures))

    same(jax.jit(jax.value_and_grad(our_r1))(d_params), slopes(theirs, doubled(d_params, True)))


def test_the_path_lengths_and_their_gradient_are_torchs(given, ours):
    _, our_synthesis = ours
    g_params, _, _, w, _, noise = given
    mean = 0.3

    def theirs(params):
        codes = torch.tensor(w.astype(np.float64), requires_grad=True)
        seen = (synthesize(params, codes) * planes(noise)).sum() / CONFIG.resolution
        (slope,) = torch.autograd.grad(seen, codes, create_graph=True)
        return (slope.square().sum(2).mean(1).sqrt() - mean).square().mean()

    def our_loss(params):
        length_B = losses.path_lengths(lambda w: our_synthesis(params, w), jnp.asarray(w), jnp.asarray(noise))
        return jnp.square(length_B - mean).mean()

    same(jax.jit(jax.value_and_grad(our_loss))(g_params), slopes(theirs, doubled(g_params, True)))
