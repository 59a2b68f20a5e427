"""What would fit, where nothing does: by how much it is too large, and the ways out that there are."""

from tpuswarm.catalog import Accelerator, accelerators
from tpuswarm.plan.order import Found

GIB = 2**30


def advice(accelerator: Accelerator, found: Found) -> str:
    """A sentence for a program whose smallest form does not fit.

    Its state is spread over all devices, the rest is one row's work; what other slices or rows would need follows from
    that and is an estimate.
    """
    have, held = accelerator.generation.compiler_hbm_bytes, found.held or 0
    if not found.needed:
        return f"even its smallest form ({found.smallest}) does not fit, and the compiler does not say by how much"
    work = found.needed - held
    ways = [_more_chips(accelerator, held, work, have)]
    if held < have:
        ways.append(
            f"rows of at most {(have - held) / work:.0%} of this length, such as a smaller --context (estimate)"
        )
    if "recomputed" not in found.smallest:
        ways.append("layers that are recomputed, which this recipe does not offer (Recipe.forms)")
    return (
        f"even its smallest form ({found.smallest}) needs {found.needed / GIB:.2f} GiB a device of {have / GIB:.2f}, "
        f"{(found.needed - have) / GIB:.2f} too many, and {held / GIB:.2f} of it is the state; what would help: "
        f"{'; '.join(ways)}"
    )


def _more_chips(accelerator: Accelerator, held: int, work: int, have: int) -> str:
    same = [each for each in accelerators() if each.generation is accelerator.generation]
    larger = sorted((each for each in same if each.chips > accelerator.chips), key=lambda each: each.chips)
    for each in larger:
        if held * accelerator.devices / each.devices + work <= have:
            return f"more chips, {each.name} or larger (estimate)"
    bigger = sorted({each.generation.name for each in accelerators() if each.generation.compiler_hbm_bytes > have})
    return f"more memory a chip ({', '.join(bigger)}); more chips of this kind do not help"
