"""In random histories of losses, suspensions and kills, a run in a bucket has one owner and loses no row."""

import pytest

from tests.train.storage.histories import play

pytestmark = pytest.mark.slow
HISTORIES = 200


@pytest.mark.parametrize("part", range(4))
def test_run_has_one_owner_and_loses_nothing(part, tmp_path):
    owners = 0
    for seed in range(part, HISTORIES, 4):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        try:
            owners += max((found.epoch for found in play(seed, folder).history), default=0)
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise
    assert owners > HISTORIES / 4, "most histories have a takeover"
