"""What would fit, where nothing does: by how much it is too large, and the ways out that there are."""

from tpuswarm.catalog import Accelerator, accelerators
from tpuswarm.config.units import GIB
from tpuswarm.plan.order import Found


def advice(accelerator: Accelerator, found: Found) -> str:
    """A sentence for a program whose smallest form does not fit; what has not been compiled is marked."""
    have, held = accelerator.generation.compiler_hbm_bytes, found.held or 0
    if not found.needed:
        return f"even its smallest form ({found.smallest}) does not fit, and the compiler does not say by how much"
    ways = [_more_chips(accelerator, found.needed, have)]
    if held < have:
        share = (have - held) / (found.needed - held)
        ways.append(f"rows of at most {share:.0%} of this length, such as a smaller --context (estimate)")
    if "recomputed" not in found.smallest:
        ways.append("layers that are recomputed, which this recipe does not offer (Recipe.forms)")
    return (
        f"even its smallest form ({found.smallest}) needs {found.needed / GIB:.2f} GiB a device of {have / GIB:.2f}, "
        f"{(found.needed - have) / GIB:.2f} too many, and {held / GIB:.2f} of it is the state; what would help: "
        f"{'; '.join(ways)}"
    )


def _more_chips(accelerator: Accelerator, needed: int, have: int) -> str:
    """The smallest slice that could hold it if all of it were split over the devices."""
    same = [each for each in accelerators() if each.generation is accelerator.generation]
    for each in sorted(same, key=lambda each: each.chips):
        if each.chips > accelerator.chips and needed * accelerator.devices <= have * each.devices:
            return f"more chips, {each.name} at the least (estimate: plan it with --on {each.name})"
    more = [each for each in accelerators() if each.generation.compiler_hbm_bytes > have]
    enough = (
        each for each in more if needed * accelerator.devices <= each.devices * each.generation.compiler_hbm_bytes
    )
    if bigger := dict.fromkeys(each.generation.name for each in enough):
        return f"chips with more memory ({', '.join(bigger)}; estimate), as no slice of these has enough"
    return "a smaller model, as no slice of any TPU has enough (estimate)"
