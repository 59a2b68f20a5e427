"""StyleGAN2 as a recipe.

    tpuswarm train stylegan2-32 --data digits

Rates are those of Karras et al.: Adam at 0.002 for 512 and 1024 (1912.04958, appendix B), 0.0025 below (2006.06676,
appendix C).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tpuswarm.config.limits import NUMBER_LIMITS as SETTINGS
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError, NoSuchSplit
from tpuswarm.recipes.stylegan2.config import FIRST, SIZES, Config
from tpuswarm.train.recipe import Options, Recipe, Source

if TYPE_CHECKING:  # a wrong option is answered before JAX is loaded: what needs it is imported by the method that does
    import numpy as np

    from tpuswarm.recipes.stylegan2.files import Prepared
    from tpuswarm.recipes.stylegan2.making import Make
    from tpuswarm.recipes.stylegan2.program import StyleGAN2Program
    from tpuswarm.recipes.stylegan2.projection import Projection

DIGITS, FAKE = MADE = ("digits", "fake")
"""Data that every machine makes for itself."""
LIMITS: dict[str, Mapping[str, float]] = {
    **{name: {"least": 1} for name in ("latent", "mapping", "channels", "most_channels", "average")},
    "group": {"least": 2},
    "lr": {"above": 0},
    "r1": {"least": 0},
    "seed": SETTINGS["seed"],
}
"""Of the options that are numbers."""
GRID, GRID_PIXELS = 8, 1024
"""Pictures along a side of the grid that a run makes as it learns, and pixels at most."""
BATCH = {512: 16, 1024: 16}
"""Pictures of a step, of the sizes where it is not 32."""


class StyleGAN2(Recipe):
    """One StyleGAN2 and its pictures; what is None follows from `resolution`.

    - data: a folder, zip or tar of pictures, local or a URL; `digits` (scikit-learn's), or `fake` for random pixels.
    - odd: `crop` takes the middle square of pictures and enlarges small ones, `refuse` names the first such.
    - latent: width of the codes; mapping: layers of the mapping network; channels: at the full resolution, twice as
      many at each half of it up to most_channels; group: pictures over which minibatch deviation is taken.
    - r1: weight of the gradient penalty; None is 0.0002 pixels / batch.
    - average: half-life of the generator's moving average, in pictures.
    - adapt: adaptive augmentation of the pictures, for data of few of them.
    - seed: of the order of the rows.
    """

    target = "tpuswarm.recipes.stylegan2.recipe:StyleGAN2"
    compiling = MappingProxyType({"tpu": {"exec_time_optimization_effort": -1.0}})
    """A step has hundreds of convolutions: at the usual effort one of 3 x 3 and 512 channels takes the compiler 29 s of
    a processor, at this 2 s."""

    def __init__(
        self,
        *,
        resolution: int = 32,
        data: str = DIGITS,
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
        if resolution < 2 * FIRST or resolution & (resolution - 1):
            raise InputError(f"a resolution is a power of two from {2 * FIRST} on, not {resolution}")
        usual = SIZES.get(resolution) or replace(SIZES[32 if resolution < 32 else 1024], resolution=resolution)
        given = {
            "latent": latent, "mapping": mapping, "channels": channels, "most_channels": most_channels, "group": group
        }  # fmt: skip
        self.name = f"stylegan2-{resolution}"
        self.config: Config = replace(usual, **{name: value for name, value in given.items() if value is not None})
        local = data not in MADE and "://" not in data
        self._data = str(Path(data).expanduser().absolute()) if local else data
        self._odd, self._seed = odd, seed
        self._r1, self._average, self._adapt = r1, average, adapt
        self._lr = lr if lr is not None else 0.002 if resolution >= 512 else 0.0025
        values = {**vars(self.config), "lr": self._lr, "r1": r1, "average": average, "seed": seed}
        for name, limits in LIMITS.items():
            if values[name] is not None:
                check_number(values[name], name, **limits)
        if odd not in ("crop", "refuse"):
            raise InputError(f"odd is crop or refuse, not {odd!r}")
        self.defaults = {"batch": BATCH.get(resolution, 32), "steps": 2_000, "outer": "average"}

    def options(self) -> dict[str, Any]:
        """Everything that makes this recipe again."""
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

    def program(self, options: Options) -> "StyleGAN2Program":
        """The program; of the options it supports precision."""
        from tpuswarm.recipes.stylegan2.program import StyleGAN2Program

        return StyleGAN2Program(self.config, options, self._lr, self._r1, self._average, self._adapt)

    def data(self, split: str) -> Source:
        """Pictures of a split: the last tenth is held out."""
        from tpuswarm.train.data.source import ArraySource

        pictures = self._pictures
        first = len(pictures) - len(pictures) // 10
        part = {"train": slice(0, first), "validation": slice(first, None), "all": slice(None)}.get(split)
        if part is None:
            raise NoSuchSplit(f"pictures have no {split} part; evaluate on other pictures, with --data")
        return ArraySource({"pictures": pictures[part]}, self._seed)

    def share(self, folder: Path) -> dict[str, Any]:
        """The pictures at the resolution."""
        if self._data in MADE:
            return {}
        from tpuswarm.recipes.stylegan2.files import share_pictures

        share_pictures(self._prepared, folder)
        return {"data": str(folder)}

    def grids(
        self, state: Any, rows: int, columns: int, *, truncation: float, seed: int, count: int = 1
    ) -> "Iterator[np.ndarray]":
        """Pictures of the averaged generator side by side, of codes that `seed` gives, on a closed walk from there."""
        from tpuswarm.recipes.stylegan2.making import make_grids

        return make_grids(self._make, state, rows, columns, truncation, seed, self.config.latent, count)

    def pictured(self, state: Any) -> "np.ndarray":
        """A grid of the same codes at every step."""
        side = max(1, min(GRID, GRID_PIXELS // self.config.resolution))
        return next(self.grids(state, side, side, truncation=1.0, seed=0))

    def measures(self, state: Any, features: str | None, far: Callable[[int, int], None]) -> dict[str, Any]:
        """Distances of generated pictures from real ones: those held out, and of the others as many as are missing."""
        from tpuswarm.recipes.stylegan2.measuring import measure

        batch = BATCH.get(self.config.resolution, 32)
        return measure(self._make, state, self._pictures, self.config.latent, batch, features, far)

    def read_picture(self, path: Path) -> "np.ndarray":
        """The middle square of a picture at the resolution: uint8 (side, side, 3)."""
        from tpuswarm.recipes.stylegan2 import files

        return files.read_picture(path, self.config.resolution)

    def project(
        self, state: Any, picture: "np.ndarray", steps: int, seed: int, far: Callable[[int, int], None]
    ) -> "Projection":
        """The code of a picture uint8 (side, side, 3), and what the averaged generator makes of it."""
        from tpuswarm.recipes.stylegan2.projection import project

        return project(self.program(Options()), state, picture, steps, seed, far)

    def export(self, state: Any, folder: Path) -> None:
        """The averaged generator, the discriminator and the mean code, with a description in words."""
        from tpuswarm.recipes.stylegan2.export import write

        write(state, self.config, folder)

    @cached_property
    def _make(self) -> "Make":
        from tpuswarm.recipes.stylegan2.making import maker

        return maker(self.program(Options()))

    @cached_property
    def _pictures(self) -> "np.ndarray":
        from tpuswarm.recipes.stylegan2 import pictures

        if self._data in MADE:
            return {DIGITS: pictures.digits, FAKE: pictures.fake}[self._data](self.config.resolution)
        return self._prepared.array

    @cached_property
    def _prepared(self) -> "Prepared":
        from tpuswarm.recipes.stylegan2.files import prepare_pictures
        from tpuswarm.train.process.terminal import echo

        found = prepare_pictures(self._data, self.config.resolution, "refuse" if self._odd == "refuse" else "crop")
        if found.damaged:
            more = f" and {found.damaged - len(found.named)} more" if found.damaged > len(found.named) else ""
            all_ = found.damaged + len(found.array)
            echo(f"{found.damaged} of {all_} pictures cannot be read: {'; '.join(found.named)}{more}", err=True)
        if len(found.array) < 10:
            raise InputError(
                f"{self._data} has too few pictures ({len(found.array)}): it takes at least 10, one of them held out"
            )
        return found
