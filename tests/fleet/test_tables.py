"""Tables of machines where there is no room: what names one, and its price, is never cut."""

import time
from io import StringIO

from rich.console import Console

from tests.fleet.loop import desired, pool
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine
from tpuswarm.fleet.view import machines_table, rows
from tpuswarm.train.look.live import Column, table


def drawn(made) -> str:
    screen = StringIO()
    Console(width=80, file=screen).print(made)
    assert max(map(len, screen.getvalue().splitlines())) <= 80
    return screen.getvalue()


def test_long_names_types_and_states():
    wanted = desired(pool(count=2))
    about = {"zone": "europe-west4-b", "created": time.time() - 5e5}
    labels = {FLEET_LABEL: wanted.fleet, POOL_LABEL: "small"}
    router = Machine(
        name="language-model-2-router", kind="vm", type="n2-highmem-16", state="repairing", said="RUNNING",
        labels=labels, **about,
    )  # fmt: skip
    slice_ = Machine(
        name="v5e-euw4b-11", kind="tpu", type="v5litepod-256", state="creating", said="UNHEALTHY_[/MAINTENANCE]",
        how="spot", labels=labels, **about,
    )  # fmt: skip
    shown = drawn(machines_table(rows(wanted, Listing((router, slice_), frozenset()), [], time.time()), 80))
    assert "…" not in shown and "".join(shown.split()).count("unhealthy_") == 1
    assert all(each in shown for each in ("language-model-2-router", "v5litepod-256", "n2-highmem-16", "cost, $"))


def test_a_reason_is_wrapped_and_is_no_markup():
    columns = [Column("job"), Column("machine"), Column("state"), Column("why", wraps=20)]
    why = "set-up stopped at mount: mkfs: [/dev/sdb] is mounted; [setup] names it under secrets, and no one has one"
    shown = drawn(table(columns, [("a-job-with-a-name", "v2-usc1f-0/0", "waiting", why)], 80))
    assert why.replace(" ", "") in "".join(line[42:] for line in shown.splitlines()[1:]).replace(" ", "")
    assert "a-job-with-a-name  v2-usc1f-0/0  waiting" in shown
