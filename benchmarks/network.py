"""Compute what a head's network carries, and each aggregator's on machines of their own. A second; measures nothing.

100 members push into one commit every five minutes, Nesterov, the run in a bucket. `tpuswarm plan --members` computes
the same for the speed of each TPU.
"""

from typing import get_args

from benchmarks.report import Settings, Table
from tpuswarm.plan.format import format_number
from tpuswarm.plan.head import Flow, network_load
from tpuswarm.plan.traffic import Exchange
from tpuswarm.swarm.core.values import Form

MEMBER_COUNT, CYCLE_S = 100, 300.0
ELEMENTS = {"1.5 B": 1_557_611_200, "10 B": 10_000_000_000}
FORMS: tuple[Form, ...] = get_args(Form)


def run(settings: Settings) -> Table:
    rows = []
    for name, elements in ELEMENTS.items():
        loads = [network_load(MEMBER_COUNT, Exchange(elements, CYCLE_S, 1, form), "nesterov") for form in FORMS]
        each = loads[0].fragments // loads[0].aggregators
        rows += [
            (f"{name}: the head with all", *(_show(load.head) for load in loads)),
            (
                f"{name}: each aggregator, {each} of {loads[0].fragments} fragments",
                *(_show(load.aggregator) for load in loads),
            ),
        ]
    return Table(
        f"Mean Gbit/s in, out; {MEMBER_COUNT} members, a push every {CYCLE_S:.0f} s",
        ("parameters: machine", *FORMS),
        rows,
        [f"without aggregators the head has {_show(loads[0].head_alone)}"],
    )


def _show(flow: Flow) -> str:
    return f"{format_number(flow.received)}, {format_number(flow.sent)}"
