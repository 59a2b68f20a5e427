"""The StyleGAN2 recipe.

    tpuswarm train stylegan2-32 --data digits

Rates are from Karras et al.: Adam at 0.002 for 512 and 1024 (1912.04958, appendix B), 0.0025 below (2006.06676,
appendix C).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tpuswarm.config.limits import NUMBER_LIMITS
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError, NoSuchSplit
from tpuswarm.recipes.stylegan2.config import MIN_RESOLUTION, SIZES, Config
from tpuswarm.train.recipe import Options, Recipe, Source

if TYPE_CHECKING:  # methods import JAX, so that a wrong option fails before it loads
    import numpy as np

    from tpuswarm.recipes.stylegan2.pictures import Prepared
    from tpuswarm.recipes.stylegan2.program import StyleGAN2Program
    from tpuswarm.recipes.stylegan2.samples import Make, Projection

GENERATED_DATA = ("digits", "fake")
"""Every machine generates these data itself."""
LIMITS: dict[str, Mapping[str, float]] = {
    **{name: {"least": 1} for name in ("latent", "mapping", "channels", "most_channels", "average")},
    "group": {"least": 2},
    "lr": {"above": 0},
    "r1": {"least": 0},
    "seed": NUMBER_LIMITS["seed"],
}
MAX_GRID_PICTURES, MAX_GRID_PIXELS = 8, 1024
"""Along a side of the grid that each evaluation draws."""


class StyleGAN2(Recipe):
    """One StyleGAN2 and its pictures; options that are None follow from `resolution`.

    - data: a folder, zip or tar of pictures, local or a URL; `digits` (scikit-learn's), or `fake` for random pixels.
    - odd: `crop` takes the middle square of pictures and enlarges small ones, `refuse` names the first such.
    - latent: width of the codes; mapping: layers of the mapping network; channels: at the full resolution, doubled at
      each half of it up to most_channels; group: pictures over which minibatch deviation is taken.
    - r1: weight of the gradient penalty; None is 0.0002 pixels / batch.
    - average: half-life of the generator's moving average, in pictures.
    - adapt: adaptive augmentation of the pictures, for small data sets.
    - seed: of the order of the rows.
    """

    target = "tpuswarm.recipes.stylegan2.recipe:StyleGAN2"
    compiling = MappingProxyType({"tpu": {"exec_time_optimization_effort": -1.0}})
    """A step has hundreds of convolutions. With 3 x 3 and 512 channels the compiler takes 29 s for one at the usual
    effort, and 2 s at this."""

    def __init__(
        self,
        *,
        resolution: int = 32,
        data: str = "digits",
        odd: str = "crop",
        latent: int | None = None,
        mapping: int | None = None,
        channels: int | None = None,
        most_channels: int | None = None,
        group: int | None = None,
        lr: float | None = None,
        r1: float | None = None,
        average: int = 10_000,
        adapt: bool = True,
        seed: int = 0,
    ):
        if resolution < 2 * MIN_RESOLUTION or resolution & (resolution - 1):
            raise InputError(f"a resolution is a power of two from {2 * MIN_RESOLUTION} on, not {resolution}")
        default = SIZES.get(resolution) or replace(SIZES[32 if resolution < 32 else 1024], resolution=resolution)
        given = {
            "latent": latent, "mapping": mapping, "channels": channels, "most_channels": most_channels, "group": group
        }  # fmt: skip
        self.name = f"stylegan2-{resolution}"
        self.config: Config = replace(default, **{name: value for name, value in given.items() if value is not None})
        is_path = data not in GENERATED_DATA and "://" not in data
        self._data = str(Path(data).expanduser().absolute()) if is_path else data
        self._odd, self._seed = odd, seed
        self._r1, self._average, self._adapt = r1, average, adapt
        self._lr = lr if lr is not None else 0.002 if resolution >= 512 else 0.0025
        values = {**vars(self.config), "lr": self._lr, "r1": r1, "average": average, "seed": seed}
        for name, limits in LIMITS.items():
            if values[name] is not None:
                check_number(values[name], name, **limits)
        if odd not in ("crop", "refuse"):
            raise InputError(f"odd is crop or refuse, not {odd!r}")
        self._batch = 16 if resolution in (512, 1024) else 32
        self.option_defaults = {**vars(self.config), "lr": self._lr}
        self.defaults = {"batch": self._batch, "steps": 2_000, "outer": "average"}

    def options(self) -> dict[str, Any]:
        """Return every option that rebuilds this recipe."""
        options = {
            **vars(self.config),
            "data": self._data,
            "odd": self._odd,
            "lr": self._lr,
            "r1": self._r1,
            "average": self._average,
            "adapt": self._adapt,
            "seed": self._seed,
        }
        return {name: value for name, value in options.items() if value is not None}

    def describe(self) -> dict[str, str]:
        """Describe the shape, the pictures and the learning rate."""
        held_out = len(self._pictures) // 10
        return {
            "model": f"resolution {self.config.resolution}, codes of {self.config.latent}",
            "data": f"{len(self._pictures) - held_out:,} pictures to train on, {held_out:,} held out",
            "learning rate": f"{self._lr:g}",
        }

    def program(self, options: Options) -> "StyleGAN2Program":
        """Return the program; the only option it supports is precision."""
        from tpuswarm.recipes.stylegan2.program import StyleGAN2Program

        return StyleGAN2Program(self.config, options, self._lr, self._r1, self._average, self._adapt)

    def data(self, split: str) -> Source:
        """Return the pictures of a split; the last tenth is held out."""
        from tpuswarm.train.data.source import ArraySource

        pictures = self._pictures
        first = len(pictures) - len(pictures) // 10
        part = {"train": slice(0, first), "validation": slice(first, None), "all": slice(None)}.get(split)
        if part is None:
            raise NoSuchSplit(f"pictures have no {split} part; evaluate on other pictures, with --data")
        return ArraySource({"pictures": pictures[part]}, self._seed)

    def share(self, folder: Path) -> dict[str, Any]:
        """Copy the pictures at the resolution."""
        if self._data in GENERATED_DATA:
            return {}
        from tpuswarm.recipes.stylegan2.pictures import share_pictures

        share_pictures(self._prepared, folder)
        return {"data": str(folder)}

    def grids(
        self, state: Any, rows: int, columns: int, *, truncation: float, seed: int, count: int = 1
    ) -> "Iterator[np.ndarray]":
        """Yield grids of pictures of the averaged generator, on a closed walk from the codes of `seed`."""
        from tpuswarm.recipes.stylegan2.samples import make_grids

        return make_grids(self._make, state, rows, columns, truncation, seed, self.config.latent, count)

    def pictured(self, state: Any) -> "np.ndarray":
        """Draw a grid, from the same codes at every step."""
        side = max(1, min(MAX_GRID_PICTURES, MAX_GRID_PIXELS // self.config.resolution))
        return next(self.grids(state, side, side, truncation=1.0, seed=0))

    def measures(self, state: Any, features: str | None, report: Callable[[int, int], None]) -> dict[str, Any]:
        """Return the distances of generated pictures to held-out ones, and to others if those are few."""
        from tpuswarm.recipes.stylegan2.distances import measure

        return measure(self._make, state, self._pictures, self.config.latent, self._batch, features, report)

    def read_picture(self, path: Path) -> "np.ndarray":
        """Return the middle square of a picture at the resolution: uint8 (side, side, 3)."""
        from tpuswarm.recipes.stylegan2.pictures import read_picture

        return read_picture(path, self.config.resolution)

    def project(
        self, state: Any, picture: "np.ndarray", steps: int, seed: int, report: Callable[[int, int], None]
    ) -> "Projection":
        """Find the code of a picture uint8 (side, side, 3), and the averaged generator's picture of it."""
        from tpuswarm.recipes.stylegan2.samples import project

        return project(self.program(Options()), state, picture, steps, seed, report)

    def export(self, state: Any, folder: Path) -> None:
        """Write the averaged generator, the discriminator and the mean code, with a description in words."""
        from tpuswarm.recipes.stylegan2.export import write

        write(state, self.config, folder)

    @cached_property
    def _make(self) -> "Make":
        from tpuswarm.recipes.stylegan2.samples import maker

        return maker(self.program(Options()))

    @cached_property
    def _pictures(self) -> "np.ndarray":
        from tpuswarm.recipes.stylegan2 import pictures

        if self._data in GENERATED_DATA:
            return {"digits": pictures.digits, "fake": pictures.fake}[self._data](self.config.resolution)
        return self._prepared.array

    @cached_property
    def _prepared(self) -> "Prepared":
        from tpuswarm.recipes.stylegan2.pictures import prepare_pictures
        from tpuswarm.train.process.terminal import echo

        prepared = prepare_pictures(self._data, self.config.resolution, "refuse" if self._odd == "refuse" else "crop")
        count, damaged, named = len(prepared.array), prepared.damaged, prepared.named
        if damaged:
            more = f" and {damaged - len(named)} more" if damaged > len(named) else ""
            echo(f"{damaged} of {damaged + count} pictures cannot be read: {'; '.join(named)}{more}", err=True)
        if count < 10:
            raise InputError(f"{self._data} has too few pictures ({count}): it takes at least 10, one of them held out")
        return prepared
