from itertools import islice

import pytest

from tpuswarm.errors import InputError
from tpuswarm.fleet.core.names import by_number, free_names, resolve, short_zone

NAMES = ("v2-usc1f-0", "v2-usc1f-7", "v2-usc1f-10", "v3-euw4a-7", "v3-euw4a-1", "gpt2-head")


@pytest.mark.parametrize(
    ("zone", "short"),
    [("us-central1-f", "usc1f"), ("europe-west4-a", "euw4a"), ("asia-northeast1-b", "asiane1b"),
     ("us-south1-ai1b", "uss1ai1b"), ("southamerica-west1-c", "saw1c"), ("mars-north1-a", "marsn1a")],
)  # fmt: skip
def test_zones_in_short(zone, short):
    assert short_zone(zone) == short


def test_no_two_zones_of_the_catalogue_have_one_name():
    from tpuswarm.catalog import accelerators
    from tpuswarm.catalog.accelerators import ACCESSES

    zones = {zone for each in accelerators() for access in ACCESSES for zone in each.zones(access)}
    assert len({short_zone(zone) for zone in zones}) == len(zones) > 40


def test_the_lowest_free_number_comes_first():
    assert list(islice(free_names("v2", "us-central1-f", NAMES), 3)) == ["v2-usc1f-1", "v2-usc1f-2", "v2-usc1f-3"]


@pytest.mark.parametrize(
    ("text", "name"), [("v2-usc1f-7", "v2-usc1f-7"), ("10", "v2-usc1f-10"), ("1", "v3-euw4a-1"), ("gpt", "gpt2-head"),
                       ("v2-usc1f-1", "v2-usc1f-10")],
)  # fmt: skip
def test_short_forms(text, name):
    assert resolve(text, NAMES) == name


@pytest.mark.parametrize(
    ("text", "said"),
    [("7", "'7' may be v2-usc1f-7, v3-euw4a-7: give more of the name"), ("v3", "may be v3-euw4a-1, v3-euw4a-7"),
     ("v2-usc1f-8", "there is no machine 'v2-usc1f-8'; did you mean v2-usc1f-"), ("99", "there is no machine '99'")],
)  # fmt: skip
def test_what_is_no_name(text, said):
    with pytest.raises(InputError) as error:
        resolve(text, NAMES)
    assert said in str(error.value)


def test_numbers_are_sorted_as_numbers():
    assert sorted(NAMES, key=by_number)[-3:] == ["v2-usc1f-10", "v3-euw4a-1", "v3-euw4a-7"]
