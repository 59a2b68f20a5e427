"""The tables of docs/choosing-a-tpu.md say what the catalogue says."""

from pathlib import Path

import pytest

from tpuswarm import catalog

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "choosing-a-tpu.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]


def rows_of(*headings: str) -> dict[str, list[str]]:
    """The rows below the table heading that begins with these words, by their first cell."""
    start = next(number for number, row in enumerate(ROWS) if row[1 : 1 + len(headings)] == list(headings))
    found = {}
    for row in ROWS[start + 1 :]:
        if len(row) != len(ROWS[start]) or row[0] in found or not row[0]:
            break
        found[row[0]] = row[1:]
    return found


def test_generations():
    rows = rows_of("peak bf16 per chip", "HBM per chip")
    assert [name.lower() for name in rows] == [each.name for each in catalog.generations()]
    for row, generation in zip(rows.values(), catalog.generations(), strict=True):
        assert row[:3] == [
            f"{generation.peak_bf16 / 1e12:,.0f} TFLOP/s",
            f"{generation.hbm_bytes / 2**30:.0f} GiB",
            f"{generation.compiler_hbm_bytes / 2**30:.2f} GiB",
        ]


def test_names():
    for name, (api, gke, compiler) in rows_of("TPU API", "GKE: accelerator, topology, machine").items():
        tpu = catalog.find(name)
        assert (api, compiler) == (tpu.api_name or "–", tpu.compiler.name)
        assert gke.split(", ") == list(tpu.gke[:3])


@pytest.mark.parametrize(
    ("row", "name"), [("v2-8",) * 2, ("v3-8",) * 2, *((f"v{n}", f"v{n}-8") for n in ("4", "5e", "5p", "6e"))]
)
def test_prices(row: str, name: str):
    tpu = catalog.find(name)
    price, peak = tpu.price(), tpu.chips * tpu.generation.peak_bf16 / 1e12
    assert rows_of("$ per chip-hour on demand", "spot")[row] == [
        f"{price.on_demand / tpu.chips:.3f}",
        f"{price.spot / tpu.chips:.3f}",
        f"{peak / price.on_demand:,.0f}",
        f"{peak / price.spot:,.0f}",
    ]
