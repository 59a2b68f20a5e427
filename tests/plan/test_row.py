"""What would help where nothing fits."""

import pytest

from tpuswarm import catalog
from tpuswarm.config.units import GIB
from tpuswarm.plan.request import CompileResult
from tpuswarm.plan.row import explain_no_fit
from tpuswarm.train.program import compiled


@pytest.mark.parametrize(
    ("tpu", "gib", "state_gib", "rows", "words"),
    [
        ("v5e-8", 21, 1, 1, "needs 21.00 GiB per device, 5.25 more than the 15.75 available"),
        ("v5e-8", 21, 1, 2, "more chips, at least v5e-16 (estimate; check with --on v5e-16)"),
        ("v5e-8", 21, 1, 1, "chips with more memory (v4, v5p, v6e, tpu7x; estimate): no v5e slice has enough"),
        ("v5e-8", 21, 20, 1, "more chips, at least v5e-16"),
        ("v5e-1", 17, 16, 1, "more chips, at least v5e-4"),
        ("v5e-8", 100, 60, 1, "chips with more memory (v5p, tpu7x; estimate)"),
        ("v5p-12288", 2000, 1, 1, "a smaller model or shorter rows: no TPU slice has enough (estimate)"),
        ("v5e-8", 21, 1, 4, "fewer than 4 rows per device at a time (a larger --accumulate or a smaller --batch)"),
    ],
)
def test_more_chips_split_the_state_and_the_rows_but_no_row(tpu, gib, state_gib, rows, words):
    needs = CompileResult(
        False, needed=gib * GIB, smallest_state=state_gib * GIB, smallest="sharded", is_sharded=True, rows=rows
    )
    assert words in explain_no_fit(catalog.find(tpu), needs)


def test_replicated_state_that_is_too_large_can_be_split():
    needs = CompileResult(False, needed=18 * GIB, smallest_state=17 * GIB, smallest="replicated")
    expected = "splitting the state over the devices (drop --shard); chips with more memory"
    assert expected in explain_no_fit(catalog.find("v3-8"), needs)


def test_needed_memory_is_read_in_tebibytes():
    refusal = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (8.00T) "
    assert compiled.needed_bytes(refusal + "exceeds available HBM (15.75G).") == 8 * 2**40
