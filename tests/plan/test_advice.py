"""What would help where nothing fits."""

import pytest

from tpuswarm import catalog
from tpuswarm.config.units import GIB
from tpuswarm.plan.advice import advice
from tpuswarm.plan.order import Found
from tpuswarm.train import fit


@pytest.mark.parametrize(
    ("tpu", "gib", "said"),
    [
        ("v5e-8", 21, "needs 21.00 GiB a device of 15.75, 5.25 too many"),
        ("v5e-8", 21, "more chips, v5e-16 at the least (estimate: plan it with --on v5e-16)"),
        ("v5e-256", 17, "chips with more memory (v4, v5p, v6e, tpu7x; estimate), as no slice of these has enough"),
        ("v5e-256", 1000, "chips with more memory (v5p, tpu7x; estimate)"),
        ("v5p-12288", 2000, "a smaller model, as no slice of any TPU has enough (estimate)"),
    ],
)
def test_more_chips_or_larger_ones_or_neither(tpu, gib, said):
    assert said in advice(catalog.find(tpu), Found(False, needed=gib * GIB, held=GIB, smallest="sharded"))


def test_a_refusal_is_read_in_every_unit():
    """The compiler's own sentence, for 8 TiB."""
    refusal = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (8.00T) "
    assert fit._needed_bytes(refusal + "exceeds available HBM (15.75G).") == 8 * 2**40
