"""The lines of docs/modern-jax.md; lines with torch: tests/oracle/test_torch_arrays.py."""

import re

import jax
import pytest

from tests.journeys.modern_jax_rows import CODE, PAGE, check, names, rows
from tpuswarm import Trainer


@pytest.mark.parametrize("row", [row for row in rows() if not row.needs_torch], ids=lambda row: CODE.match(row.now)[1])
def test_old_line_ends_as_documented_and_new_line_works(row):
    with jax.numpy_rank_promotion("allow"):
        check(row, names())


def test_every_row_is_found():
    assert len(rows()) >= 35 and sum(row.needs_torch for row in rows()) == 2


def test_trainers_for_lightning_users_are_valid():
    ours = re.findall(r"^\| `Trainer.* \| .*`(Trainer\(.*?\))`", PAGE.read_text(), flags=re.MULTILINE)
    assert [eval(code) for code in ours] == [Trainer(devices=8), Trainer(devices=[4]), Trainer(precision="bf16")]
