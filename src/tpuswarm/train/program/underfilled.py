"""Find products that leave a TPU's matrix unit half empty.

A matrix unit multiplies `unit` x `unit` numbers at a time (tpuswarm.catalog: 128, since v6e 256). It holds a tile of
one operand, contracted x columns, and the rows of the other run through it (Jouppi et al. 2017, section 2). Both sides
of the tile are padded to the unit, and fewer rows than the unit do not hide the loading of the next tile.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tpuswarm.config.formatting import format_share
from tpuswarm.train.program.flops import Flops, Product
from tpuswarm.train.user_code import CodeLine, users_line

MAX_FILL = 0.5
MIN_WASTE_SHARE = 0.2
"""Smallest reported waste at one line of the user, or in our own recipe, as a share of the matrix unit's time."""


@dataclass(frozen=True)
class Underfilled:
    """Products of one line whose dimension `size` fills too little of the matrix unit."""

    place: CodeLine | None
    """Line of the user's recipe."""
    size: int
    unit: int
    fill: float
    """Share of the unit that these products use."""
    waste: float
    """Share of the unit's time in the whole step that these products waste."""

    def __str__(self) -> str:
        return (
            f"a dimension of {self.size} fills only {format_share(self.fill)} of the {self.unit}x{self.unit} matrix "
            f"unit and wastes {format_share(self.waste)} of its time; a multiple of {self.unit} fills it"
        )


def underfilled(flops: Flops, unit: int, batch: int, devices: int) -> list[Underfilled]:
    """Return the lines with the most waste first.

    unit: side of the matrix unit; batch: rows of a micro-batch over all `devices`, which share that axis.
    """
    found: dict[tuple[CodeLine | None, int], list[tuple[float, float]]] = defaultdict(list)
    total_time = 0.0
    for product in flops.products:
        sizes = _on_a_device(product, batch, devices)
        if 1 in sizes:
            continue  # the compiler does not use the matrix unit for vectors
        fill = _fill(sizes, unit)
        time = product.flops / fill
        total_time += time
        if fill <= MAX_FILL:
            worst = min(sizes, key=lambda size: _padded(size, unit))
            found[users_line(product.place), worst].append((product.flops, time))
    places = []
    for (place, size), products in found.items():
        useful, time = map(sum, zip(*products, strict=True))
        if time - useful >= MIN_WASTE_SHARE * total_time:
            places.append(Underfilled(place, size, unit, useful / time, (time - useful) / total_time))
    return sorted(places, key=lambda line: -line.waste)


def _on_a_device(product: Product, batch: int, devices: int) -> list[int]:
    """Return rows, contracted and columns on one device: it has a part of the batch's axis."""
    sizes = [math.prod(axes) for axes in (product.rows, product.contracted, product.columns)]
    if batch in product.leading:
        sizes[product.leading.index(batch)] //= devices
    return sizes


def _fill(sizes: Sequence[int], unit: int) -> float:
    """Return the share of the unit in use, for the better choice of the operand to hold."""
    rows, contracted, columns = sizes
    held = max(
        _padded(columns, unit) * min(1.0, rows / unit),
        _padded(rows, unit) * min(1.0, columns / unit),
    )
    return _padded(contracted, unit) * held


def _padded(size: int, unit: int) -> float:
    return size / (math.ceil(size / unit) * unit)
