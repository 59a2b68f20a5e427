"""Compare the catalogue's zones with what Google offers to a project."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from tpuswarm.catalog import APIS, Api, accelerators
from tpuswarm.catalog.accelerators import ACCESSES
from tpuswarm.cloud.errors import Denied, NoQuota, NotFound
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.project import Project
from tpuswarm.cloud.google.provider import GoogleProvider

MAX_THREADS = 16


def compare_with_project(access: Access) -> list[str]:
    """Return a sentence for each zone and API that differs. Raises CloudError if Google does not answer."""
    google, project = GoogleProvider(access), Project(access)
    zones = sorted({zone for tpu in accelerators() for kind in ACCESSES for zone in tpu.zones(kind)})

    def list_names(api: Api, zone: str) -> frozenset[str] | None:
        """Return the cloud's names of what a zone offers; None: the project does not see the zone."""
        try:
            return frozenset(google.types(zone) if api == "tpu" else project.machine_types(zone))
        except (Denied, NoQuota, NotFound):
            return None

    with ThreadPoolExecutor(MAX_THREADS) as threads:
        places = [(api, zone) for zone in zones for api in APIS]
        answers = list(threads.map(lambda place: list_names(*place), places))
    found: list[str] = []
    for (api, zone), names in zip(places, answers, strict=True):
        found += _differences(api, zone, names)
    return found


def _differences(api: Api, zone: str, names: frozenset[str] | None) -> Iterable[str]:
    types = [tpu for tpu in accelerators() if api in tpu.apis and (api == "tpu" or tpu.hosts == 1)]
    offered = {tpu.name for tpu in types if names and (tpu.api_name if api == "tpu" else tpu.machine_type) in names}
    known = {tpu.name for tpu in types if any(zone in tpu.zones(access) for access in ACCESSES)}
    open_ = {tpu.name for tpu in types if zone in tpu.zones("open")}
    if names is None:
        if open_:
            yield f"{zone}, {APIS[api]}: this project does not see the zone, which the catalogue calls open"
        return
    if more := _ordered(offered - known):
        yield f"{zone}, {APIS[api]}: offers {more}, which the catalogue lacks there"
    if fewer := _ordered(open_ - offered):
        yield f"{zone}, {APIS[api]}: offers no {fewer}, which the catalogue calls open there"


def _ordered(names: Iterable[str]) -> str:
    """List types by generation, the smallest first; of several only how many more."""
    wanted = set(names)
    types = [tpu for tpu in accelerators() if tpu.name in wanted]
    groups = [[tpu.name for tpu in same] for _, same in groupby(types, key=lambda tpu: tpu.generation.name)]
    return ", ".join(group[0] + (f" and {len(group) - 1} more" if len(group) > 1 else "") for group in groups)
