"""Float32 where bf16 was asked: a layer that keeps its own dtype passes it on to all that follows."""

from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.float32 import float32_inputs, float32_products

MOST = 3
"""Places that are named; they come in the order of their FLOPs."""


def float32_in_bf16(compiled: Compiled) -> list[Finding]:
    """The places that compute most in float32; none where that was asked."""
    if compiled.options.precision != "bf16":
        return []
    because = float32_inputs(compiled.jaxpr, compiled.state, compiled.inputs)
    return [
        Finding("precision", f"{each.place or 'the step'}: {each}", {"place": str(each.place), "share": each.share})
        for each in float32_products(compiled.flops, because)[:MOST]
    ]
