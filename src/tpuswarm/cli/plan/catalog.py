"""`tpuswarm catalog`: TPUs with their names, prices and sources."""

import json
from collections.abc import Callable, Iterable
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.catalog import Accelerator, Figure, Generation, Source, accelerators, find, generations
from tpuswarm.catalog.accelerators import ACCESSES, Access, format_topology
from tpuswarm.catalog.prices import describe_old_prices, region_of
from tpuswarm.cli.console import Json, make_console
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import GIB
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import echo

if TYPE_CHECKING:
    from rich.table import Table

USUAL_CHIPS = 64
RESTRICTIONS: dict[Access, str] = {"single tenant": "single tenant only", "sold": "only on a price list"}
"""Offers that are not open to everyone."""


def catalog(
    name: Annotated[
        str | None,
        typer.Argument(help="A TPU type by any of its names (v3-8, v5litepod-8, v5e:2x4), or a generation (v5e)."),
    ] = None,
    zone: Annotated[str | None, typer.Option(help="Only types offered in this zone or region.")] = None,
    max_chips: Annotated[
        int | None, typer.Option(min=1, help="Only slices of at most this many chips. Default of the whole list: 64.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the zones with what Google offers to your project; exit code 1.")
    ] = False,
    project: Annotated[str | None, typer.Option(help="With --check: the project. Default: gcloud's.")] = None,
    as_json: Json = False,
) -> None:
    """List TPU generations and types: names, chips, memory, speed, zones, prices; or all that is known of one type."""
    if check:
        _check(project)
        return
    named = [generation for generation in generations() if name is not None and generation.name == name.strip().lower()]
    if name is not None and not named:
        tpu = find(name)
        if zone or max_chips:
            raise InputError(f"--zone and --max-chips filter the list, and {tpu.name} is one type: leave them out")
        if as_json:
            print(json.dumps({**_type_object(tpu), "generation": _generation_object(tpu.generation)}))
        else:
            _print_type(tpu)
        return
    chosen = _choose(named or generations(), zone, max_chips)
    listed = [generation for generation in generations() if any(tpu.generation is generation for tpu in chosen)]
    if as_json:
        types = [_type_object(tpu, zone) for tpu in chosen]
        print(json.dumps({"generations": [_generation_object(generation) for generation in listed], "types": types}))
        return
    console = make_console()
    is_whole = not (named or zone or max_chips)
    shown = [tpu for tpu in chosen if not is_whole or tpu.chips <= USUAL_CHIPS]
    console.print(_generations_table(listed))
    console.print()
    console.print(_types_table(shown, zone, console.width))
    if larger := len(chosen) - len(shown):
        echo(f"{larger} larger types: `tpuswarm catalog GENERATION`, or --max-chips.")
    if dates := {price.source.read for tpu in chosen for price in tpu.prices()}:
        echo(f"Prices from public lists as of {max(dates)}; they change. Traffic is billed separately.")
    if dates and (old := describe_old_prices(date.today())):
        echo(f"note: {old}")
    echo("TFLOP/s: bf16 peak; GiB, GB/s: HBM. `tpuswarm catalog TYPE`: all names of a type, all sources.")


def _check(project: str | None) -> None:
    from tpuswarm.cli.plan.catalog_check import compare_with_project
    from tpuswarm.fleet.spec.providers import open_access

    differences = compare_with_project(open_access("google", project))
    for difference in differences:
        echo(difference)
    if differences:
        raise typer.Exit(1)
    echo("The zones of the catalogue are what Google offers to this project.")


def _choose(among: Iterable[Generation], zone: str | None, max_chips: int | None) -> list[Accelerator]:
    names = {generation.name for generation in among}
    candidates = [tpu for tpu in accelerators() if tpu.generation.name in names]
    offered = [tpu for tpu in candidates if zone is None or zone in _zones_and_regions(tpu)]
    if zone and not offered:
        raise InputError(_explain_no_offer(zone, candidates))
    chosen = [tpu for tpu in offered if max_chips is None or tpu.chips <= max_chips]
    if not chosen:
        smallest = min(offered, key=lambda tpu: tpu.chips)
        raise InputError(
            f"no TPU there has {max_chips} chips or fewer; the smallest is {smallest.name} with {smallest.chips}"
        )
    return chosen


def _explain_no_offer(zone: str, candidates: Iterable[Accelerator]) -> str:
    """Return why a zone or region has none of these types, and where to look."""
    names = list(dict.fromkeys(tpu.generation.name for tpu in candidates))
    subject, command = f"{names[0]} is not", f"tpuswarm catalog {names[0]}"
    if len(names) > 1:
        subject, command = "no TPU in the catalogue is", "tpuswarm catalog"
    restricted = {
        access: dict.fromkeys(tpu.generation.name for tpu in candidates if zone in _zones_and_regions(tpu, access))
        for access in ACCESSES[1:]
    }
    if offers := [f"{RESTRICTIONS[access]}: {', '.join(found)}" for access, found in restricted.items() if found]:
        return f"{subject} offered to everyone in {zone!r} ({'; '.join(offers)}). Open zones: `{command}`"
    if any(zone in _zones_and_regions(tpu, access) for tpu in accelerators() for access in ACCESSES):
        return f"{subject} offered in {zone!r}. Open zones: `{command}`"
    known = {place for tpu in candidates for place in _zones_and_regions(tpu)}
    return f"{subject} offered in {zone!r}: {did_you_mean(zone, known)}"


def _zones_and_regions(tpu: Accelerator, access: Access = "open") -> set[str]:
    return {place for zone in tpu.zones(access) for place in (zone, region_of(zone))}


def _generations_table(listed: list[Generation]) -> "Table":
    columns = ("chip", "TFLOP/s", "GiB", "GB/s", "cores", "devices", "runtime", "zones")
    rows = [
        (
            generation.name,
            f"{generation.peak_bf16 / 1e12:,.0f}",
            f"{generation.hbm_bytes / GIB:,.0f}",
            f"{generation.bandwidth / 1e9:,.0f}",
            str(generation.cores_per_chip),
            str(generation.devices_per_chip),
            generation.runtime or "–",
            ", ".join(_open_zones(generation)),
        )
        for generation in listed
    ]
    return _table(columns, rows, right=range(1, 6))


def _open_zones(generation: Generation) -> list[str]:
    types = [tpu for tpu in accelerators() if tpu.generation is generation]
    return list(dict.fromkeys(zone for tpu in types for zone in tpu.zones()))


def _types_table(chosen: list[Accelerator], zone: str | None, width: int) -> "Table":
    from tpuswarm.train.look.widgets import Column, make_table

    columns = [
        Column("type"), Column("topology", rank=1), Column("chips", right=True), Column("cores", right=True, rank=3),
        Column("hosts", right=True), Column("GiB", right=True), Column("TFLOP/s", right=True, rank=2),
        Column("$/h", right=True), Column("spot", right=True), Column("in"),
    ]  # fmt: skip
    rows = []
    for tpu in chosen:
        price = tpu.price(zone)
        sizes = (tpu.chips, tpu.cores, tpu.hosts, _hbm_bytes(tpu) / GIB, tpu.chips * tpu.generation.peak_bf16 / 1e12)
        cost = ("unknown", "unknown", "")
        if price:
            cost = (_format_dollars(price.on_demand), _format_dollars(price.spot), price.region)
        rows.append((tpu.name, format_topology(tpu.topology), *(f"{size:,.0f}" for size in sizes), *cost))
    return make_table(columns, rows, width)


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[int] = ()) -> "Table":
    """Make a table of at most 80 columns for types of common size. The last column folds."""
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


def _print_type(tpu: Accelerator) -> None:
    sources: list[Source] = []
    rows = []
    for fact, text, fact_sources in _list_facts(tpu):
        distinct = list(dict.fromkeys(fact_sources))
        sources += [source for source in distinct if source not in sources]
        rows.append((fact, " ".join(f"[{sources.index(source) + 1}]" for source in distinct), text))
    make_console().print(_table((tpu.name, "source", ""), rows))
    for number, source in enumerate(sources, 1):
        echo(f"[{number}] {source.title}: {source.url}, read {source.read}", hang=4)


def _list_facts(tpu: Accelerator) -> list[tuple[str, str, list[Source]]]:
    """Return all facts about a type: name, text, sources."""
    generation, host, gke = tpu.generation, tpu.host, tpu.gke
    rows: list[tuple[str, str, list[Source]]] = []

    def add(fact: str, text: str, *sources: Source) -> None:
        rows.append((fact, text, list(sources)))

    def add_figure(fact: str, figure: Figure | None, text: Callable[[Any], str]) -> None:
        if figure:
            others = [text(other.value) for other in figure.other if text(other.value) != text(figure.value)]
            differing = f" (others say {', '.join(dict.fromkeys(others))})" if others else ""
            add(fact, text(figure.value) + differing, figure.source, *(other.source for other in figure.other))

    figures = generation.figures
    add("also called", ", ".join(tpu.names[1:]), tpu.source)
    add(
        "slice",
        f"{_count(tpu.chips, 'chip')}, {format_topology(tpu.topology)}, on {_count(tpu.hosts, 'host')}",
        tpu.source,
    )
    add("total", f"{tpu.cores:,} TensorCores, {tpu.devices:,} JAX devices, {_hbm_bytes(tpu) / GIB:,.0f} GiB of HBM")
    add_figure("peak, bf16", figures["peak_bf16"], lambda value: f"{value / 1e12:,.0f} TFLOP/s per chip")
    add_figure("HBM", figures["hbm_gib"], lambda value: f"{value:.3g} GiB per chip")
    add_figure("usable", figures["compiler_hbm_gib_per_device"], lambda value: f"{value:.2f} GiB per JAX device")
    add_figure("HBM bandwidth", figures["bandwidth"], lambda value: f"{value / 1e9:,.0f} GB/s per chip")
    add_figure("matrix unit", figures["matrix_unit"], lambda value: f"{value} x {value}")
    add_figure("interconnect", figures["interconnect"], str)
    add_figure("host", host.figures.get("vcpus"), lambda value: f"{value} vCPUs")
    add_figure("", host.figures.get("memory_gb"), lambda value: f"{value:g} GB of memory")
    add_figure("runtime", figures.get("runtime"), str)
    if tpu.machine_type:
        hosts = f"{tpu.hosts:,} × " if tpu.hosts > 1 else ""
        add("Compute Engine", f"{hosts}{tpu.machine_type}, image {tpu.image('compute')}", figures["image"].source)
    add_figure("available through", figures["apis"], ", ".join)
    add_figure("frameworks", figures["frameworks"], ", ".join)
    add_figure("device kind in JAX", figures["device_kinds"], " or ".join)
    options = ", ".join(f"{key}={value!r}" for key, value in tpu.compiler.options.items())
    add("compiler name", f"{tpu.compiler.name}, {options}", figures["devices_per_chip"].source)
    if gke:
        add("GKE", f"{gke.accelerator}, topology {gke.topology}, {gke.machine}", gke.source)
    for offer in tpu.offers:
        add(f"zones, {offer.access}", ", ".join(offer.zones), offer.source)
    for price in tpu.prices():
        text = f"{_format_dollars(price.on_demand)} on demand, {_format_dollars(price.spot)} spot"
        add(f"$/h in {price.region}", text, price.source)
    if not tpu.prices():
        add("price", "unknown")
    return rows


def _type_object(tpu: Accelerator, zone: str | None = None) -> dict[str, Any]:
    prices = [price for price in tpu.prices() if zone is None or price.region == region_of(zone)]
    return {
        "name": tpu.name,
        "names": tpu.names,
        "api_name": tpu.api_name,
        "apis": tpu.apis,
        "machine_type": tpu.machine_type,
        "gke": tpu.gke and {**tpu.gke._asdict(), **_source_object(tpu.gke.source)},
        "compiler": tpu.compiler._asdict(),
        "generation": tpu.generation.name,
        "topology": tpu.topology,
        "chips": tpu.chips,
        "cores": tpu.cores,
        "devices": tpu.devices,
        "hosts": tpu.hosts,
        "chips_per_host": tpu.chips_per_host,
        "host": {key: getattr(tpu.host, key) for key in ("vcpus", "memory_gb")},
        "zones": {access: tpu.zones(access) for access in ACCESSES},
        "prices": [
            {"region": price.region, "on_demand": price.on_demand, "spot": price.spot, **_source_object(price.source)}
            for price in prices
        ],
        **_source_object(tpu.source),
    }


def _generation_object(generation: Generation) -> dict[str, Any]:
    return {
        "name": generation.name,
        "hbm_bytes": generation.hbm_bytes,
        "hbm_bytes_per_device": generation.hbm_bytes_per_device,
        "compiler_hbm_bytes": generation.compiler_hbm_bytes,
        "peak_bf16_per_device": generation.peak_bf16_per_device,
        "bandwidth_per_device": generation.bandwidth_per_device,
        "figures": {key: _figure_object(figure) for key, figure in generation.figures.items()},
    }


def _figure_object(figure: Figure) -> dict[str, Any]:
    others = [_figure_object(other) for other in figure.other]
    return {"value": figure.value, **_source_object(figure.source), **({"other": others} if others else {})}


def _source_object(source: Source) -> dict[str, str]:
    return {"source": source.title, "url": source.url, "date": source.read.isoformat()}


def _hbm_bytes(tpu: Accelerator) -> int:
    return tpu.chips * tpu.generation.hbm_bytes


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number > 1)}"


def _format_dollars(amount: float | None) -> str:
    return "unknown" if amount is None else f"{amount:,.2f}"
