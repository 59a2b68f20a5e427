"""Record figures of the authors' StyleGAN2 for test_stylegan2_authors.py.

    .venv-oracle/bin/python -m tests.recipes.stylegan2_authors FOLDER

fetches stylegan2-ada-pytorch at COMMIT into FOLDER, unless it is there, runs its training loop on the CPU for a few
steps, and writes stylegan2_authors.json beside this file. None of its code is copied: the loop, losses, networks and
Adam are theirs. Random numbers are replaced by `numbers`, which both sides compute from a name; what needs CUDA, and
pictures of progress, are left out. Augmentation is off, since ours computes geometry in another way.
"""

import json
import pickle
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import numpy as np

URL = "https://github.com/NVlabs/stylegan2-ada-pytorch"
COMMIT = "d72cc7d041b42ec8e806021a205ed9349f87c6a4"
FIGURES = Path(__file__).with_suffix(".json")

SHAPE = {"resolution": 16, "latent": 8, "mapping": 2, "channels": 6, "most_channels": 12, "group": 4}
BATCH, STEPS = 8, 5
"""Steps 0 to 4: of the regularisers both at step 0, and path length again at step 4."""
LR, R1, AVERAGE, PATH_MEAN = 0.0025, 2.0, 10_000, 0.5
PHASES = ("generator", "path", "discriminator")
"""The phases of a step that generate pictures, in order."""
LAYERS = 6
"""Codes w of a picture."""
MOMENTS_AT = (0, 1, 4)
"""Steps after which Adam's moments are compared. Its first moment is the last gradient: at step 0 that of the
regularisers, at step 1 that of the losses, at step 4 that of path length again."""


def numbers(name: str, *shape: int) -> np.ndarray:
    """Return the float32 normal numbers of a name."""
    return np.random.default_rng(list(name.encode())).normal(size=shape).astype(np.float32)


def parameter(path: str, *shape: int) -> np.ndarray:
    """Return the initial value of a parameter; none is 0, so that each has an effect."""
    value = numbers(path, *shape)
    if "/mapping/" in path:
        return value * (100 if path.endswith("w") else 30)
    if path.endswith("style/b"):
        return 1 + 0.3 * value
    return value * (1 if path.endswith(("w", "constant")) else 0.3)


def pictures(step: int) -> np.ndarray:
    """Return the real pictures of a step: uint8 (count, side, side, 3)."""
    side = SHAPE["resolution"]
    return np.clip(numbers(f"{step}/real", BATCH, side, side, 3) * 60 + 128, 0, 255).astype(np.uint8)


def rows(phase: str) -> int:
    return BATCH // 2 if phase == "path" else BATCH


def codes(step: int, phase: str) -> np.ndarray:
    """Return z of a picture's first code and of that mixed in: (count, 2, latent)."""
    return numbers(f"{step}/{phase}/z", rows(phase), 2, SHAPE["latent"])


def cut(step: int, phase: str) -> int:
    """Return the first layer with the code mixed in; LAYERS mixes none in."""
    return 1 + (step + 2 * PHASES.index(phase)) % LAYERS


def noise(step: int, phase: str) -> np.ndarray:
    """Return the noise of all layers, one after the other, and of one more at 4 x 4 that is not used."""
    pixels = sum(4**power for power in range(2, SHAPE["resolution"].bit_length()))
    return numbers(f"{step}/{phase}/noise", rows(phase), 2 * pixels)


def path_noise(step: int) -> np.ndarray:
    side = SHAPE["resolution"]
    return numbers(f"{step}/path/pictures", rows("path"), side, side, 3)


def summary(path: str, array: np.ndarray) -> list[float]:
    """Return the norm of an array and its product with random numbers, which sees every element's place."""
    exact = np.asarray(array, np.float64)
    return [float(np.linalg.norm(exact)), float((exact * numbers(f"{path}/summary", *exact.shape)).sum())]


# The rest runs where torch and the authors' code are.


def fetch(folder: Path) -> None:
    if not folder.exists():
        git = ["git", "-C", str(folder)]
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
        subprocess.run([*git, "fetch", "--quiet", "--depth", "1", URL, COMMIT], check=True)
        subprocess.run([*git, "checkout", "--quiet", COMMIT], check=True)
    head = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, stdout=subprocess.PIPE, text=True
    )
    if head.stdout.strip() != COMMIT:
        raise SystemExit(f"{folder} is at {head.stdout.strip()}, not {COMMIT}")


def our_path(name: str) -> str:
    """Return our path of the authors' parameter, such as synthesis.b8.conv0.affine.weight."""
    ours = {
        "weight": "w", "bias": "b", "noise_strength": "noise", "affine": "style", "torgb": "rgb", "const": "constant",
        "fromrgb": "rgb", "skip": "skip", "fc": "dense", "out": "score", "conv": "same",
    }  # fmt: skip
    network, *parts = name.split(".")
    if parts[0] == "mapping":
        return "/".join([network, "mapping", parts[1].removeprefix("fc"), ours[parts[2]]])
    block, layer, *rest = parts[1:] if network == "generator" else parts
    rest = [ours[part] for part in rest]
    if layer in ("const", "fromrgb"):
        return "/".join([network, ours[layer], *rest])
    if network == "discriminator" and block == "b4":
        return "/".join([network, "last", ours[layer], *rest])
    convolutions = ("up", "same") if network == "generator" else ("same", "down")
    ours |= dict(zip(("conv0", "conv1"), convolutions, strict=True))
    return "/".join([network, "blocks", block.removeprefix("b"), ours[layer], *rest])


def our_order(name: str, array: np.ndarray) -> np.ndarray:
    """Return the authors' array with our order of axes and elements."""
    if array.ndim == 3:
        return array.transpose(1, 2, 0)
    if array.ndim == 4:
        kernel = array.transpose(2, 3, 1, 0)
        return kernel[::-1, ::-1] if name.startswith("generator") and "conv0" in name else kernel
    if name.endswith("b4.fc.weight"):
        outputs = len(array)
        return array.reshape(outputs, -1, 4, 4).transpose(2, 3, 1, 0).reshape(-1, outputs)
    return array.T


def their_order(count: int) -> np.ndarray:
    """Return the rows in an order in which the authors' groups, which take every nth picture, are our neighbours."""
    return np.arange(count).reshape(-1, SHAPE["group"]).T.ravel() if count == BATCH else np.arange(count)


class Stand:
    """A module in the place of another, with some of its names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name):
        return getattr(self._module, name)


def record(folder: Path, run: Path) -> dict[str, object]:
    """Run the authors' loop, which writes into `run`; return the figures."""
    sys.path.insert(0, str(folder))
    import dnnlib
    import torch
    import training.dataset
    import training.loss
    import training.networks
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from training import training_loop

    channels = {"channel_base": SHAPE["channels"] * SHAPE["resolution"], "channel_max": SHAPE["most_channels"]}
    network = {"img_resolution": SHAPE["resolution"], "img_channels": 3, "c_dim": 0}
    of_generator = {
        "class_name": "training.networks.Generator", "z_dim": SHAPE["latent"], "w_dim": SHAPE["latent"],
        "mapping_kwargs": dnnlib.EasyDict(num_layers=SHAPE["mapping"]), "synthesis_kwargs": dnnlib.EasyDict(channels),
    }  # fmt: skip
    of_discriminator = {
        "class_name": "training.networks.Discriminator", **channels,
        "epilogue_kwargs": dnnlib.EasyDict(mbstd_group_size=SHAPE["group"]),
    }  # fmt: skip
    now = types.SimpleNamespace(step=-1, phase=None, noise_at=0, losses=None)

    def tensors(module, prefix):
        return {f"{prefix}.{name}": value for name, value in module.named_parameters()}

    def filled(options, prefix):
        module = dnnlib.util.construct_class_by_name(**options, **network)
        for name, value in tensors(module, prefix).items():
            places = our_order(name, np.arange(value.numel()).reshape(value.shape))
            ours = parameter(our_path(name), *places.shape)
            flat = np.empty(value.numel(), np.float32)
            flat[places.ravel()] = ours.ravel()
            value.data.copy_(torch.from_numpy(flat.reshape(value.shape)))
        return module

    def summaries(values):
        return {our_path(name): summary(our_path(name), our_order(name, value)) for name, value in values.items()}

    G, D = filled(of_generator, "generator"), filled(of_discriminator, "discriminator")
    G.mapping.w_avg.copy_(torch.from_numpy(0.3 * numbers("w_mean", SHAPE["latent"])))
    named = [tensors(G, "generator"), tensors(D, "discriminator")]

    figures: dict[str, object] = {"commit": COMMIT, "torch": torch.__version__}
    z, real = (torch.from_numpy(array) for array in (codes(0, "generator")[:, 0], pictures(0)))
    order = their_order(BATCH)
    with torch.no_grad():
        ours = real.permute(0, 3, 1, 2).float() / 127.5 - 1
        made = G.eval()(z, None, truncation_psi=0.7, noise_mode="none").permute(0, 2, 3, 1).numpy()
        scores = D(ours[order], None)[:, 0].numpy()[np.argsort(order)]
        G.train()
    figures["outputs"] = {
        "pictures": summary("pictures", made), "pixels": made[:2, 5, 7].ravel().tolist(), "scores": scores.tolist()
    }  # fmt: skip

    class Rows:
        """The real pictures of one step after the other."""

        resolution, num_channels, label_dim, has_labels = SHAPE["resolution"], 3, 0, False
        image_shape, label_shape = (3, SHAPE["resolution"], SHAPE["resolution"]), [0]

        def __len__(self):
            return BATCH * STEPS

        def __getitem__(self, index):
            step, place = divmod(index, BATCH)
            return pictures(step)[order[place]].transpose(2, 0, 1).copy(), np.zeros(0, np.float32)

        def get_label(self, _):
            return np.zeros(0, np.float32)

    class Loss(training.loss.StyleGAN2Loss):
        """The authors' loss, which says which phase it is in."""

        def __init__(self, **options):
            super().__init__(**options)
            self.pl_mean.fill_(PATH_MEAN)
            now.losses = self

        def accumulate_gradients(self, phase, **arguments):
            now.phase = {"Gmain": "generator", "Greg": "path", "Dmain": "discriminator", "Dreg": None}[phase]
            now.noise_at = 0
            super().accumulate_gradients(phase=phase, **arguments)

    training.dataset.Rows, training.loss.Loss = Rows, Loss

    def drawn_z(shape, **_):
        """The first codes of all phases of the next step."""
        if shape[0] != 4 * BATCH:
            return torch.randn(shape)
        now.step += 1
        of_phases = np.zeros((4, BATCH, SHAPE["latent"]), np.float32)
        for place, phase in enumerate(PHASES):
            of_phases[place, : rows(phase)] = codes(now.step, phase)[their_order(rows(phase)), 0]
        return torch.from_numpy(of_phases.reshape(-1, SHAPE["latent"]))

    def like(value):
        if value.ndim == 2:
            return torch.from_numpy(codes(now.step, now.phase)[their_order(len(value)), 1])
        return torch.from_numpy(path_noise(now.step).transpose(0, 3, 1, 2).copy())

    def drawn_noise(shape, **_):
        if now.phase is None:
            return torch.randn(shape)
        first, now.noise_at = now.noise_at, now.noise_at + shape[2] * shape[3]
        drawn = noise(now.step, now.phase)[their_order(shape[0]), first : now.noise_at]
        return torch.from_numpy(drawn.reshape(shape))

    def empty(*_, **__):
        return types.SimpleNamespace(random_=lambda *_: torch.tensor(min(cut(now.step, now.phase), LAYERS - 1)))

    def rand(*_, **__):
        return torch.tensor(1.0 if cut(now.step, now.phase) == LAYERS else 0.0)

    event = types.SimpleNamespace(record=lambda *_: None, synchronize=lambda: None, elapsed_time=lambda _: 0.0)
    no_cuda = types.SimpleNamespace(
        Event=lambda **_: event, current_stream=lambda _: None, max_memory_allocated=lambda _: 0,
        reset_peak_memory_stats=lambda: None,
    )  # fmt: skip
    training_loop.torch = Stand(torch, randn=drawn_z, cuda=no_cuda, device=lambda *_: torch.device("cpu"))
    training.loss.torch = Stand(torch, randn_like=like, empty=empty, rand=rand)
    training.networks.torch = Stand(torch, randn=drawn_noise)
    torch.Tensor.pin_memory = lambda self: self
    one = np.zeros((1, *Rows.image_shape), np.uint8), np.zeros((1, 0), np.float32)
    training_loop.setup_snapshot_image_grid = lambda **_: ((1, 1), *one)
    training_loop.save_image_grid = lambda *_, **__: None
    training_loop.misc = Stand(
        training_loop.misc, print_module_summary=lambda *_: None, InfiniteSampler=lambda **_: range(BATCH * STEPS)
    )

    moments: dict[tuple[int, int], dict[str, dict[str, list[float]]]] = {}

    def keep_moments(optimizer, *_):
        values = [value for group in optimizer.param_groups for value in group["params"]]
        which = next(place for place, names in enumerate(named) if len(names) == len(values))
        moments[now.step, which] = {
            ours: summaries(
                {name: optimizer.state[value][theirs].numpy() for name, value in zip(named[which], values, strict=True)}
            )
            for ours, theirs in (("mu", "exp_avg"), ("nu", "exp_avg_sq"))
        }

    path_means = []

    def is_done():
        path_means.append(float(now.losses.pl_mean))
        return now.step == STEPS - 1

    register_optimizer_step_post_hook(keep_moments)
    training_loop.legacy = Stand(training_loop.legacy, load_network_pkl=lambda _: {"G": G, "D": D, "G_ema": G})
    training_loop.training_loop(
        run_dir=str(run),
        training_set_kwargs={"class_name": "training.dataset.Rows"},
        G_kwargs=of_generator,
        D_kwargs=of_discriminator,
        G_opt_kwargs={"class_name": "torch.optim.Adam", "lr": LR, "betas": [0, 0.99], "eps": 1e-8},
        D_opt_kwargs={"class_name": "torch.optim.Adam", "lr": LR, "betas": [0, 0.99], "eps": 1e-8},
        loss_kwargs={"class_name": "training.loss.Loss", "r1_gamma": R1},
        batch_size=BATCH,
        batch_gpu=BATCH,
        ema_kimg=AVERAGE / 1000,
        ema_rampup=0.05,
        kimg_per_tick=0,
        image_snapshot_ticks=None,
        network_snapshot_ticks=1,
        resume_pkl=__file__,  # opened, but `load_network_pkl` gives what is loaded
        abort_fn=is_done,
    )
    logged = [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]
    columns = {"g_loss": "Loss/G/loss", "d_loss": "Loss/D/loss", "r1": "Loss/r1_penalty"}
    figures["steps"] = [
        {ours: row[theirs]["mean"] for ours, theirs in columns.items()} | {"path_mean": path_mean}
        for row, path_mean in zip(logged, path_means, strict=True)
    ]
    figures["moments"] = {
        str(step): {moment: moments[step, 0][moment] | moments[step, 1][moment] for moment in ("mu", "nu")}
        for step in MOMENTS_AT
    }
    with (run / "network-snapshot-000000.pkl").open("rb") as file:
        after = pickle.load(file)
    parameters = {**tensors(after["G"], "generator"), **tensors(after["D"], "discriminator")}
    figures["parameters"] = summaries({name: value.detach().numpy() for name, value in parameters.items()})
    averages = tensors(after["G_ema"], "generator")
    behind = {
        our_path(name): our_order(name, (parameters[name] - value).detach().numpy()) for name, value in averages.items()
    }
    figures["behind"] = summary("behind", np.concatenate([behind[path].ravel() for path in sorted(behind)]))
    figures["w_mean"] = after["G"].mapping.w_avg.tolist()
    return figures


def main(folder: Path) -> None:
    fetch(folder)
    with tempfile.TemporaryDirectory() as run:
        FIGURES.write_text(json.dumps(record(folder, Path(run)), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
