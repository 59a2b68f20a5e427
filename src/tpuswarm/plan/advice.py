"""What would fit, where nothing does: by how much it is too large, and the ways out that there are."""

from tpuswarm.catalog import Accelerator, accelerators
from tpuswarm.config.units import GIB
from tpuswarm.plan.order import Found


def advice(accelerator: Accelerator, found: Found) -> str:
    """A sentence for a program whose smallest form does not fit; what has not been compiled is marked."""
    have, held = accelerator.generation.compiler_hbm_bytes, found.held or 0
    if not found.needed:
        return f"even its smallest form ({found.smallest}) does not fit, and the compiler does not say by how much"
    ways = []
    if not found.spread and accelerator.devices > 1:
        ways.append("splitting the state over the devices (drop --shard)")
    if found.rows > 1:
        ways.append(f"fewer than {found.rows} rows per device at a time (a larger --accumulate or a smaller --batch)")
    ways.append(_more_chips(accelerator, found))
    if held < have:
        share = (have - held) / (found.needed - held)
        ways.append(f"rows at most {share:.0%} as long, for example a smaller --context (estimate)")
    if "recomputed" not in found.smallest:
        ways.append("recomputing layers, which this recipe does not support (forms)")
    return (
        f"even its smallest form ({found.smallest}) needs {found.needed / GIB:.2f} GiB per device, "
        f"{(found.needed - have) / GIB:.2f} more than the {have / GIB:.2f} available; {held / GIB:.2f} of it is the "
        "state; what would help: "
        f"{'; '.join(ways)}"
    )


def _more_chips(accelerator: Accelerator, found: Found) -> str:
    """The smallest slice that could hold it."""

    def holds(other: Accelerator) -> bool:
        return _needed(found, accelerator.devices, other.devices) <= other.generation.compiler_hbm_bytes

    same = [each for each in accelerators() if each.generation is accelerator.generation]
    for each in sorted(same, key=lambda each: each.chips):
        if each.chips > accelerator.chips and holds(each):
            return f"more chips, at least {each.name} (estimate; check with --on {each.name})"
    have = accelerator.generation.compiler_hbm_bytes
    more = [each for each in accelerators() if each.generation.compiler_hbm_bytes > have and holds(each)]
    if bigger := dict.fromkeys(each.generation.name for each in more):
        return f"chips with more memory ({', '.join(bigger)}; estimate): no slice of these has enough"
    return "a smaller model or shorter rows: no TPU slice has enough (estimate)"


def _needed(found: Found, devices: int, others: int) -> float:
    """Bytes a device on `others` devices: the state is split further, but one row's activations never are."""
    assert found.needed is not None and found.held is not None
    split = devices / others if found.spread or devices == 1 else 1
    rows = min(found.rows, max(1, found.rows * devices / others))
    return found.held * split + (found.needed - found.held) * rows / found.rows
