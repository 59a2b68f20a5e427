"""Run StyleGAN2's step in plain PyTorch, for `stylegan2_gpu.py`; it does not need tpuswarm.

    python torch_stylegan2.py cpu|cuda '{"resolution": 256, "latent": 512, "mapping": 8, "channels": 64, …}'

Like our recipe it modulates activations, multiplies in bfloat16 (on CUDA), and computes the four highest resolutions in
it; lazy R1 and path length, style mixing, noise, Adam, moving average. Eager, because torch.compile differentiates only
once; channels last, cuDNN's fastest algorithms, fused Adam. A worker of `turns.py`.
"""

import json
import sys
import time
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  # the common name

R1_INTERVAL, PATH_INTERVAL, HALF_RESOLUTION_COUNT, MAPPING_RATE_FACTOR = 16, 4, 4, 0.01
Tree = dict[str, Any]


class StyleGAN2:
    """Both networks, with their parameters as trees."""

    def __init__(self, resolution: int, latent: int, mapping: int, channels: int, most_channels: int, group: int):
        self.side, self.D, self.mapping, self.group = resolution, latent, mapping, group
        self.sizes = [2**power for power in range(2, resolution.bit_length())]
        self.width = {R: min(channels * resolution // R, most_channels) for R in self.sizes}
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
        self.taps = taps[:, None] * taps

    def generator(self) -> Tree:
        """Fresh parameters."""
        blocks: Tree = {}
        before = self.width[4]
        for R in self.sizes:
            C = self.width[R]
            block = {"same": self._styled(3, C, C), "rgb": self._styled(1, C, 3)}
            blocks[str(R)] = block if R == 4 else {"up": self._styled(3, before, C), **block}
            before = C
        mapping = {str(layer): _dense(self.D, self.D, 1 / MAPPING_RATE_FACTOR) for layer in range(self.mapping)}
        return {"mapping": mapping, "constant": torch.randn(1, self.width[4], 4, 4), "blocks": blocks}

    def discriminator(self) -> Tree:
        """Fresh parameters."""
        blocks: Tree = {}
        for R in self.sizes[:0:-1]:
            C, after = self.width[R], self.width[R // 2]
            blocks[str(R)] = {"same": _conv(3, C, C), "down": _conv(3, C, after), "skip": _conv(1, C, after)}
            del blocks[str(R)]["skip"]["b"]
        C = self.width[4]
        last = {"same": _conv(3, C + 1, C), "dense": _dense(16 * C, C), "score": _dense(C, 1)}
        return {"rgb": _conv(1, 3, self.width[self.side]), "blocks": blocks, "last": last}

    def codes(self, params: Tree, count: int) -> torch.Tensor:
        """Random w of each layer, BxLxD; most batches switch to a second code at a random layer."""
        layers = 2 * len(self.sizes)
        x = torch.randn(2 * count, self.D, device=params["constant"].device)
        x = x * (x.square().mean(-1, keepdim=True) + 1e-8).rsqrt()
        for layer in range(self.mapping):
            x = _leaky(_linear(x, params["mapping"][str(layer)], MAPPING_RATE_FACTOR))
        cut = torch.randint(1, layers, (), device=x.device)
        cut = torch.where(torch.rand((), device=x.device) < 0.9, cut, layers)
        early = torch.arange(layers, device=x.device) < cut
        return torch.where(early[None, :, None], x[:count, None], x[count:, None])

    def synthesize(self, params: Tree, w: torch.Tensor) -> torch.Tensor:
        """Generate pictures B3HW from codes BxLxD."""
        x = params["constant"].expand(len(w), -1, -1, -1)
        picture, index = None, 0
        for R in self.sizes:
            x = x.to(self._dtype(R, x))
            block = params["blocks"][str(R)]
            for name in ("up", "same"):
                if name in block:
                    p = block[name]
                    x = self._modulated(x, w[:, index], p, up=name == "up")
                    x = x + (torch.randn(len(x), 1, R, R, device=x.device) * p["noise"]).to(x.dtype)
                    x = _leaky(x + p["b"].to(x.dtype)[:, None, None])
                    index += 1
            rgb = self._modulated(x, w[:, index], block["rgb"], demodulate=False).float()
            rgb = rgb + block["rgb"]["b"][:, None, None]
            picture = rgb if picture is None else self._twice(picture) + rgb
        assert picture is not None
        return picture

    def score(self, params: Tree, x: torch.Tensor) -> torch.Tensor:
        """Score pictures B3HW."""
        for R in self.sizes[:0:-1]:
            x = x.to(self._dtype(R, x))
            if self.side == R:
                x = self._biased(_convolve(x, _scaled(params["rgb"])), params["rgb"])
            block = params["blocks"][str(R)]
            skip = _convolve(self._filtered(x, 1, (1, 1, 1, 1))[:, :, ::2, ::2], _scaled(block["skip"]))
            x = self._biased(_convolve(x, _scaled(block["same"]), padding=1), block["same"])
            x = self._filtered(x, 1, (2, 2, 2, 2))
            x = self._biased(_convolve(x, _scaled(block["down"]), stride=2), block["down"])
            x = (x + skip) * 0.5**0.5
        x, last = x.float(), params["last"]
        grouped = x.view(-1, self.group, *x.shape[1:])
        deviation = (grouped.var(1, correction=0) + 1e-8).sqrt().mean((1, 2, 3))
        channel = deviation.repeat_interleave(self.group)[:, None, None, None].expand(-1, 1, 4, 4)
        x = self._biased(_convolve(torch.cat([x, channel], 1), _scaled(last["same"]), padding=1), last["same"])
        return _linear(_leaky(_linear(x.flatten(1), last["dense"])), last["score"])[:, 0]

    def _styled(self, size: int, inputs: int, outputs: int) -> Tree:
        style = _dense(self.D, inputs)
        style["b"] += 1
        return {**_conv(size, inputs, outputs), "noise": torch.zeros(()), "style": style}

    def _modulated(
        self, x: torch.Tensor, w: torch.Tensor, p: Tree, up: bool = False, demodulate: bool = True
    ) -> torch.Tensor:
        style, kernel = _linear(w, p["style"]), _scaled(p)
        x = x * style.to(x.dtype)[:, :, None, None]
        if up:
            dtype = _product(x)
            x = F.conv_transpose2d(x.to(dtype), kernel.to(dtype).transpose(0, 1).flip(2, 3), stride=2).to(x.dtype)
            x = self._filtered(x, 4, (1, 1, 1, 1))
        else:
            x = _convolve(x, kernel, padding=kernel.shape[-1] // 2)
        if demodulate:
            scale = (style.square() @ kernel.square().sum((2, 3)).T + 1e-8).rsqrt()
            x = x * scale.to(x.dtype)[:, :, None, None]
        return x

    def _filtered(self, x: torch.Tensor, gain: float, around: tuple[int, int, int, int]) -> torch.Tensor:
        kernel = (self.taps.to(x) * gain).expand(x.shape[1], 1, 4, 4)
        return F.conv2d(F.pad(x, around), kernel, groups=x.shape[1])

    def _twice(self, x: torch.Tensor) -> torch.Tensor:
        between = torch.zeros(*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3], device=x.device)
        between[:, :, ::2, ::2] = x
        return self._filtered(between, 4, (2, 1, 2, 1))

    def _dtype(self, R: int, x: torch.Tensor) -> torch.dtype:
        return torch.bfloat16 if x.is_cuda and self.side < R << HALF_RESOLUTION_COUNT else torch.float32

    @staticmethod
    def _biased(x: torch.Tensor, p: Tree) -> torch.Tensor:
        return _leaky(x + p["b"].to(x.dtype)[:, None, None])


def _conv(size: int, inputs: int, outputs: int) -> Tree:
    return {"w": torch.randn(outputs, inputs, size, size), "b": torch.zeros(outputs)}


def _dense(inputs: int, outputs: int, deviation: float = 1.0) -> Tree:
    return {"w": torch.randn(outputs, inputs) * deviation, "b": torch.zeros(outputs)}


def _scaled(p: Tree) -> torch.Tensor:
    return p["w"] * (p["w"].numel() // len(p["w"])) ** -0.5


def _linear(x: torch.Tensor, p: Tree, rate: float = 1.0) -> torch.Tensor:
    return F.linear(x, _scaled(p) * rate, p["b"] * rate)


def _leaky(x: torch.Tensor) -> torch.Tensor:
    return F.leaky_relu(x, 0.2) * 2**0.5


def _product(x: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if x.is_cuda else x.dtype


def _convolve(x: torch.Tensor, kernel: torch.Tensor, **how: int) -> torch.Tensor:
    dtype = _product(x)
    return F.conv2d(x.to(dtype), kernel.to(dtype), **how).to(x.dtype)


def _leaves(tree: Tree) -> list[torch.Tensor]:
    return [leaf for node in tree.values() for leaf in (_leaves(node) if isinstance(node, dict) else [node])]


def _on(tree: Tree, device: str) -> Tree:
    return {
        name: _on(node, device) if isinstance(node, dict)
        else node.to(device, memory_format=torch.channels_last if node.ndim == 4 else torch.preserve_format)
        .requires_grad_()
        for name, node in tree.items()
    }  # fmt: skip


def main(device: str, shape: dict[str, int]) -> None:
    """Serve blocks of steps on one random batch."""
    batch = shape.pop("batch")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")
    torch.backends.cudnn.allow_tf32 = True
    nets = StyleGAN2(**shape)
    g, d = _on(nets.generator(), device), _on(nets.discriminator(), device)
    g_all, d_all = _leaves(g), _leaves(d)
    mean = [leaf.detach().clone() for leaf in g_all]
    path_mean = torch.zeros((), device=device)

    def adam(leaves: list[torch.Tensor], every: int) -> torch.optim.Adam:
        share = every / (every + 1)
        fused = device == "cuda" or None
        return torch.optim.Adam(leaves, 0.0025 * share, (0.0, 0.99**share), eps=1e-8, fused=fused)

    g_adam, d_adam = adam(g_all, PATH_INTERVAL), adam(d_all, R1_INTERVAL)
    real = torch.rand(batch, 3, nets.side, nets.side, device=device).mul(2).sub(1)
    real = real.contiguous(memory_format=torch.channels_last)
    gamma = 0.0002 * nets.side**2 / batch

    def update(optimizer: torch.optim.Adam, leaves: list[torch.Tensor], loss: torch.Tensor) -> None:
        for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True):
            leaf.grad = torch.zeros_like(leaf) if grad is None else grad
        optimizer.step()

    def step(number: int) -> None:
        nonlocal path_mean
        with torch.no_grad():
            made = nets.synthesize(g, nets.codes(g, batch))
        loss = F.softplus(-nets.score(d, real)).mean() + F.softplus(nets.score(d, made)).mean()
        update(d_adam, d_all, loss)
        if number % R1_INTERVAL == 0:
            x = real.detach().requires_grad_()
            (slope,) = torch.autograd.grad(nets.score(d, x).sum(), x, create_graph=True)
            update(d_adam, d_all, slope.square().sum((1, 2, 3)).mean() * (gamma / 2 * R1_INTERVAL))
        update(g_adam, g_all, F.softplus(-nets.score(d, nets.synthesize(g, nets.codes(g, batch)))).mean())
        if number % PATH_INTERVAL == 0:
            w = nets.codes(g, max(batch // 2, 1))
            made = nets.synthesize(g, w)
            (slope,) = torch.autograd.grad((made * torch.randn_like(made)).sum() / nets.side, w, create_graph=True)
            length = (slope.square().sum(2).mean(1) + 1e-12).sqrt()
            target = path_mean.lerp(length.mean(), 0.01)
            path_mean = target.detach()
            update(g_adam, g_all, (length - target).square().mean() * (2 * PATH_INTERVAL))
        with torch.no_grad():
            torch._foreach_lerp_(mean, g_all, 0.002)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    step(0)
    wait()
    parameters = sum(leaf.numel() for leaf in [*g_all, *d_all])
    print(json.dumps({"torch": torch.__version__, "parameters": parameters}), flush=True)
    done = 0
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            step(done)
            done += 1
        wait()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
