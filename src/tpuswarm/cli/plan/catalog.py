"""`tpuswarm catalog`: which TPUs there are, what they are called, what they cost, and who says so."""

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.console import make_console
from tpuswarm.config.units import GIB
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from rich.table import Table

    from tpuswarm.catalog import Accelerator, Figure, Generation, Source
    from tpuswarm.catalog.accelerators import Access

RESTRICTED: dict["Access", str] = {"single tenant": "single tenant only", "sold": "only on a price list"}
"""Ways of being offered that are not to everyone, in words."""


def catalog(
    name: Annotated[
        str | None,
        typer.Argument(help="A TPU type by any of its names (v3-8, v5litepod-8, v5e:2x4), or a generation (v5e)."),
    ] = None,
    zone: Annotated[str | None, typer.Option("--zone", help="Only types offered in this zone or region.")] = None,
    max_chips: Annotated[
        int | None, typer.Option("--max-chips", min=1, help="Only slices of at most this many chips.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List TPU generations and types: names, chips, memory, speed, zones, prices; or all that is known of one type."""
    from tpuswarm.catalog import find, generations

    wanted = [each for each in generations() if name is not None and each.name == name.strip().lower()]
    if name is not None and not wanted:
        one = find(name)
        if zone or max_chips:
            raise InputError(f"--zone and --max-chips filter the list, but {one.name} is a single type: leave them out")
        if as_json:
            print(json.dumps({**_type_object(one), "generation": _generation_object(one.generation)}))
        else:
            _print_one(one)
        return
    chosen = _chosen(wanted or generations(), zone, max_chips)
    shown = [each for each in generations() if any(tpu.generation is each for tpu in chosen)]
    if as_json:
        types = [_type_object(each, zone) for each in chosen]
        print(json.dumps({"generations": [_generation_object(each) for each in shown], "types": types}))
        return
    console = make_console()
    console.print(_generations_table(shown))
    console.print()
    console.print(_types_table(chosen, zone, console.width))
    dates = {price.source.read for each in chosen for price in each.prices()}
    if dates:
        say(f"Prices from public lists as of {max(dates)}; they change. Traffic is billed separately.")
    say("TFLOP/s: bf16 peak; GiB, GB/s: HBM. `tpuswarm catalog TYPE`: all names of a type, all sources.")


def _chosen(among: Iterable["Generation"], zone: str | None, max_chips: int | None) -> list["Accelerator"]:
    from tpuswarm.catalog import accelerators

    names = {each.name for each in among}
    asked = [each for each in accelerators() if each.generation.name in names]
    chosen = [each for each in asked if zone is None or zone in _places(each)]
    if zone and not chosen:
        raise InputError(_nothing_in(zone, asked))
    found = [each for each in chosen if max_chips is None or each.chips <= max_chips]
    if not found:
        smallest = min(chosen, key=lambda each: each.chips)
        raise InputError(
            f"no TPU there has {max_chips} chips or fewer; the smallest is {smallest.name} with {smallest.chips}"
        )
    return found


def _nothing_in(zone: str, asked: Iterable["Accelerator"]) -> str:
    """Why none of these types is listed for a zone or region, and where to look."""
    from tpuswarm.catalog import accelerators
    from tpuswarm.catalog.accelerators import ACCESSES
    from tpuswarm.config.nearest import did_you_mean

    names = list(dict.fromkeys(each.generation.name for each in asked))
    what, command = f"{names[0]} is not", f"tpuswarm catalog {names[0]}"
    if len(names) > 1:
        what, command = "no TPU in the catalogue is", "tpuswarm catalog"
    some = {
        access: dict.fromkeys(each.generation.name for each in asked if zone in _places(each, access))
        for access in ACCESSES[1:]
    }
    if who := "; ".join(f"{RESTRICTED[access]}: {', '.join(which)}" for access, which in some.items() if which):
        return f"{what} offered to everyone in {zone!r} ({who}): `{command}` lists open zones"
    if any(zone in _places(each, access) for each in accelerators() for access in ACCESSES):
        return f"{what} offered in {zone!r}: `{command}` lists open zones"
    return f"{what} offered in {zone!r}: {did_you_mean(zone, {place for each in asked for place in _places(each)})}"


def _places(tpu: "Accelerator", access: "Access" = "open") -> set[str]:
    """Zones that offer it in this way, and their regions."""
    return {place for zone in tpu.zones(access) for place in (zone, _region(zone))}


def _region(zone: str) -> str:
    from tpuswarm.catalog.prices import region_of

    return region_of(zone)


def _generations_table(shown: list["Generation"]) -> "Table":
    columns = ("chip", "TFLOP/s", "GiB", "GB/s", "cores", "devices", "runtime", "zones")
    rows = [
        (
            each.name,
            f"{each.peak_bf16 / 1e12:,.0f}",
            f"{each.hbm_bytes / GIB:,.0f}",
            f"{each.bandwidth / 1e9:,.0f}",
            str(each.cores_per_chip),
            str(each.devices_per_chip),
            each.runtime or "–",
            ", ".join(_open_zones(each)),
        )
        for each in shown
    ]
    return _table(columns, rows, right=range(1, 6))


def _open_zones(generation: "Generation") -> list[str]:
    from tpuswarm.catalog import accelerators

    types = [each for each in accelerators() if each.generation is generation]
    return list(dict.fromkeys(zone for each in types for zone in each.zones()))


def _types_table(chosen: list["Accelerator"], zone: str | None, width: int) -> "Table":
    from tpuswarm.train.look.live import Column, table

    columns = [
        Column("type"),
        Column("topology", rank=1),
        Column("chips", right=True),
        Column("cores", right=True, rank=3),
        Column("hosts", right=True),
        Column("GiB", right=True),
        Column("TFLOP/s", right=True, rank=2),
        Column("$/h", right=True),
        Column("spot", right=True),
        Column("in"),
    ]
    rows = []
    for each in chosen:
        price = each.price(zone)
        sizes = (each.chips, each.cores, each.hosts, _hbm(each) / GIB, _peak(each) / 1e12)
        dollars = (
            (_dollars(price.on_demand), _dollars(price.spot), price.region) if price else ("unknown", "unknown", "")
        )
        rows.append((each.name, _topology(each), *(f"{size:,.0f}" for size in sizes), *dollars))
    return table(columns, rows, width)


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[int] = ()) -> "Table":
    """A table of at most 80 columns for types of common size; the last column takes what width there is left."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    *fixed, last = columns
    for number, column in enumerate(fixed):
        table.add_column(column, justify="right" if number in right else "left", no_wrap=True)
    table.add_column(last, overflow="fold", min_width=12)
    for row in rows:
        table.add_row(*row)
    return table


def _print_one(one: "Accelerator") -> None:
    sources: list[Source] = []
    rows = []
    for fact, text, origins in _facts(one):
        sources += [each for each in dict.fromkeys(origins) if each not in sources]
        rows.append((fact, " ".join(f"[{sources.index(each) + 1}]" for each in dict.fromkeys(origins)), text))
    console = make_console()
    console.print(_table((one.name, "source", ""), rows))
    for number, each in enumerate(sources, 1):
        say(f"[{number}] {each.title}: {each.url}, read {each.read}", hang=4)


def _facts(one: "Accelerator") -> list[tuple[str, str, list["Source"]]]:
    """What is known of one type: what, in words, and who says so."""
    generation, host, gke = one.generation, one.host, one.gke
    rows: list[tuple[str, str, list[Source]]] = []

    def add(fact: str, text: str, *sources: "Source") -> None:
        rows.append((fact, text, list(sources)))

    def stated(fact: str, figure: "Figure | None", text: Callable[[Any], str]) -> None:
        if figure:
            others = [text(each.value) for each in figure.other if text(each.value) != text(figure.value)]
            differ = f" (others say {', '.join(dict.fromkeys(others))})" if others else ""
            add(fact, text(figure.value) + differ, figure.source, *(each.source for each in figure.other))

    figures = generation.figures
    add("also called", ", ".join(one.names[1:]), one.source)
    add("slice", f"{_count(one.chips, 'chip')}, {_topology(one)}, on {_count(one.hosts, 'host')}", one.source)
    add("total", f"{one.cores:,} TensorCores, {one.devices:,} JAX devices, {_hbm(one) / GIB:,.0f} GiB of HBM")
    stated("peak, bf16", figures["peak_bf16"], lambda value: f"{value / 1e12:,.0f} TFLOP/s per chip")
    stated("HBM", figures["hbm_gib"], lambda value: f"{value:.3g} GiB per chip")
    stated("usable", figures["compiler_hbm_gib_per_device"], lambda value: f"{value:.2f} GiB per JAX device")
    stated("HBM bandwidth", figures["bandwidth"], lambda value: f"{value / 1e9:,.0f} GB/s per chip")
    stated("matrix unit", figures["matrix_unit"], lambda value: f"{value} x {value}")
    stated("interconnect", figures["interconnect"], str)
    stated("host", host.figures.get("vcpus"), lambda value: f"{value} vCPUs")
    stated("", host.figures.get("memory_gb"), lambda value: f"{value:g} GB of memory")
    stated("runtime", figures.get("runtime"), str)
    stated("available through", figures["apis"], ", ".join)
    stated("frameworks", figures["frameworks"], ", ".join)
    stated("device kind in JAX", figures["device_kinds"], " or ".join)
    options = ", ".join(f"{key}={value!r}" for key, value in one.compiler.options.items())
    add("compiler name", f"{one.compiler.name}, {options}", figures["devices_per_chip"].source)
    if gke:
        add("GKE", f"{gke.accelerator}, topology {gke.topology}, {gke.machine}", gke.source)
    for offer in one.offers:
        add(f"zones, {offer.access}", ", ".join(offer.zones), offer.source)
    for price in one.prices():
        text = f"{_dollars(price.on_demand)} on demand, {_dollars(price.spot)} spot"
        add(f"$/h in {price.region}", text, price.source)
    if not one.prices():
        add("price", "unknown")
    return rows


def _type_object(one: "Accelerator", zone: str | None = None) -> dict[str, Any]:
    from tpuswarm.catalog.accelerators import ACCESSES

    prices = [price for price in one.prices() if zone is None or price.region == _region(zone)]
    return {
        "name": one.name,
        "names": one.names,
        "api_name": one.api_name,
        "gke": one.gke and {**one.gke._asdict(), **_source_object(one.gke.source)},
        "compiler": one.compiler._asdict(),
        "generation": one.generation.name,
        "topology": one.topology,
        "chips": one.chips,
        "cores": one.cores,
        "devices": one.devices,
        "hosts": one.hosts,
        "chips_per_host": one.chips_per_host,
        "host": {key: getattr(one.host, key) for key in ("vcpus", "memory_gb")},
        "zones": {access: one.zones(access) for access in ACCESSES},
        "prices": [
            {"region": each.region, "on_demand": each.on_demand, "spot": each.spot, **_source_object(each.source)}
            for each in prices
        ],
        **_source_object(one.source),
    }


def _generation_object(generation: "Generation") -> dict[str, Any]:
    return {
        "name": generation.name,
        "hbm_bytes": generation.hbm_bytes,
        "hbm_bytes_per_device": generation.hbm_bytes_per_device,
        "compiler_hbm_bytes": generation.compiler_hbm_bytes,
        "peak_bf16_per_device": generation.peak_bf16_per_device,
        "bandwidth_per_device": generation.bandwidth_per_device,
        "figures": {key: _figure_object(figure) for key, figure in generation.figures.items()},
    }


def _figure_object(figure: "Figure") -> dict[str, Any]:
    other = [_figure_object(each) for each in figure.other]
    return {"value": figure.value, **_source_object(figure.source), **({"other": other} if other else {})}


def _source_object(source: "Source") -> dict[str, str]:
    return {"source": source.title, "url": source.url, "date": source.read.isoformat()}


def _topology(one: "Accelerator") -> str:
    from tpuswarm.catalog.accelerators import format_topology

    return format_topology(one.topology)


def _hbm(one: "Accelerator") -> int:
    return one.chips * one.generation.hbm_bytes


def _peak(one: "Accelerator") -> float:
    return one.chips * one.generation.peak_bf16


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number > 1)}"


def _dollars(amount: float | None) -> str:
    return "unknown" if amount is None else f"{amount:,.2f}"
