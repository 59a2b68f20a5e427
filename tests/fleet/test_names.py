"""Names of machines: how they are made, abbreviated, sorted and printed in narrow tables."""

import time
from io import StringIO
from itertools import islice

import pytest
from rich.console import Console

from tests.fleet.loop import desired, machine, pool
from tpuswarm.catalog import accelerators
from tpuswarm.catalog.accelerators import ACCESSES
from tpuswarm.cloud.protocol import Listing
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.names import by_number, free_names, resolve_name, short_zone
from tpuswarm.fleet.view import machine_rows, machines_table

NAMES = ("v2-usc1f-0", "v2-usc1f-7", "v2-usc1f-10", "v3-euw4a-7", "v3-euw4a-1", "gpt2-head")


@pytest.mark.parametrize(
    ("zone", "short"),
    [("us-central1-f", "usc1f"), ("europe-west4-a", "euw4a"), ("asia-northeast1-b", "asiane1b"),
     ("us-south1-ai1b", "uss1ai1b"), ("southamerica-west1-c", "saw1c"), ("mars-north1-a", "marsn1a")],
)  # fmt: skip
def test_zone_is_abbreviated(zone, short):
    assert short_zone(zone) == short


def test_abbreviations_of_the_catalogues_zones_are_unique():
    zones = {zone for tpu in accelerators() for access in ACCESSES for zone in tpu.zones(access)}
    assert len({short_zone(zone) for zone in zones}) == len(zones) > 40


def test_lowest_free_number_comes_first_and_names_sort_by_number():
    assert list(islice(free_names("v2", "us-central1-f", NAMES), 3)) == ["v2-usc1f-1", "v2-usc1f-2", "v2-usc1f-3"]
    assert sorted(NAMES, key=by_number)[-3:] == ["v2-usc1f-10", "v3-euw4a-1", "v3-euw4a-7"]


@pytest.mark.parametrize(
    ("text", "name"), [("v2-usc1f-7", "v2-usc1f-7"), ("10", "v2-usc1f-10"), ("1", "v3-euw4a-1"), ("gpt", "gpt2-head"),
                       ("v2-usc1f-1", "v2-usc1f-10")],
)  # fmt: skip
def test_part_of_a_name_is_enough(text, name):
    assert resolve_name(text, NAMES) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [("7", "'7' may be v2-usc1f-7, v3-euw4a-7: give more of the name"), ("v3", "may be v3-euw4a-1, v3-euw4a-7"),
     ("v2-usc1f-8", "there is no machine 'v2-usc1f-8'; did you mean v2-usc1f-"), ("99", "there is no machine '99'")],
)  # fmt: skip
def test_ambiguous_or_unknown_name_is_refused(text, message):
    with pytest.raises(InputError) as error:
        resolve_name(text, NAMES)
    assert message in str(error.value)


def draw(drawable) -> str:
    screen = StringIO()
    Console(width=80, file=screen).print(drawable)
    assert max(map(len, screen.getvalue().splitlines())) <= 80
    return screen.getvalue()


def test_long_names_types_and_states_are_never_cut():
    created = time.time() - 5e5
    router = machine("language-model-2-router", "repairing", created=created, kind="vm", type_="n2-highmem-16")
    pod = machine("v5e-euw4b-11", "unhealthy_[/maintenance]", created=created, type_="v5litepod-256")
    fleet, listing = desired(pool(count=2)), Listing((router, pod), frozenset())
    text = draw(machines_table(machine_rows(fleet, listing, [], time.time()), 80))
    assert "…" not in text and "".join(text.split()).count("unhealthy_") == 1
    assert all(name in text for name in ("language-model-2-router", "v5litepod-256", "n2-highmem-16", "cost, $"))
