"""The state for Prometheus, by its conventions: base units, `_total` for what only grows, `_ratio` from 0 to 1."""

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tpuswarm.fleet.view import machine_rows, running_rate, total_spending
from tpuswarm.swarm.views.status import RunView
from tpuswarm.train.run.listing import Status
from tpuswarm.watch.state import Machines, State
from tpuswarm.watch.top import Row

__all__ = ["CONTENT_TYPE", "exposition"]
STATES = ("running", "finished", "stopped", "failed", "killed", "not begun")
"""Of a run: one of them is 1."""


def exposition(state: State, hosts: Sequence[Row]) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_Of(state, hosts))
    return generate_latest(registry)


class _Of(Collector):
    def __init__(self, state: State, hosts: Sequence[Row]):
        self._state, self._hosts = state, hosts

    def collect(self) -> Iterator[Metric]:
        state = self._state
        yield _gauge("looked_timestamp_seconds", "When this was looked at.", state.at)
        if state.url or state.look is not None:
            yield from _run(state)
        if isinstance(state.look, RunView):
            yield from _swarm(state.look)
        if state.machines is not None:
            yield from _fleet(state.machines, state.at)
            yield from _chips(self._hosts)


def _run(state: State) -> Iterator[Metric]:
    look = state.look
    name = look.run if look else state.url
    about = GaugeMetricFamily("tpuswarm_run_info", "The run.", labels=["run", "recipe"])
    about.add_metric([name, look.recipe if look else ""], 1)
    yield about
    now = look.state if look else "not begun"
    found = GaugeMetricFamily("tpuswarm_run_state", "1 for the state that the run is in.", labels=["state"])
    for each in STATES:
        found.add_metric([each], float(each == now))
    yield found
    if look is None:
        return
    yield _counter("steps", "Steps that are done; of a swarm whole steps counted.", look.step)
    yield _gauge("steps_wanted", "Steps of the whole run.", look.steps)
    yield _counter("tokens", f"{look.unit.capitalize()} trained; of a swarm those counted.", look.tokens)
    yield from _known("tokens_per_second", f"{look.unit.capitalize()} per second, of all together.", look.tokens_per_s)
    yield from _known("loss", "Training loss; of a swarm the mean of its members' last steps.", look.loss)
    yield from _known("eval_loss", "Loss on held-out rows, at the last evaluation.", look.eval_loss)
    status: Status | object = look if isinstance(look, Status) else look.status
    yield from _known("elapsed_seconds", "Since the run began.", getattr(status, "elapsed", None))
    yield from _known("remaining_seconds", "Until the last step, at the present pace.", getattr(status, "left", None))


def _swarm(look: RunView) -> Iterator[Metric]:
    status = look.status
    yield from _known("version", "The newest commit.", status.version)
    yield from _known("coordinator_epoch", "Lives of the coordinator so far.", status.epoch)
    yield from _known("goodput_ratio", "Counted tokens as a share of those processed and settled.", status.goodput)
    yield _gauge("tokens_wanted", "Tokens of the whole run.", status.horizon)
    yield _counter("tokens_processed", "Tokens that members have trained.", status.tokens.processed)
    yield _counter("tokens_dropped", "Tokens whose contribution was not counted.", status.tokens.dropped)
    yield _gauge("tokens_outstanding", "Tokens trained and not decided yet.", status.tokens.outstanding)
    yield _gauge("tokens_lost", "Tokens of work that is lost, unless it is found.", status.tokens.lost)
    yield _counter("carried_bytes", "Bytes between members and what serves them.", status.carried)
    yield _gauge("alarms", "Things that a person should look at.", len(status.alarms))
    states = GaugeMetricFamily("tpuswarm_members", "Members by state.", labels=["state"])
    counts = Counter(each.state for each in status.members)
    for name in ("alive", "evaluating", "joining", "lost", "left"):
        states.add_metric([name], counts[name])
    yield states
    up = GaugeMetricFamily("tpuswarm_member_up", "1 where the member takes part.", labels=["member"])
    tokens = CounterMetricFamily("tpuswarm_member_tokens", "Tokens that the member trained.", labels=["member"])
    speed = GaugeMetricFamily("tpuswarm_member_tokens_per_second", "Its speed.", labels=["member"])
    loss = GaugeMetricFamily("tpuswarm_member_loss", "Mean of its last 20 steps.", labels=["member"])
    lag = GaugeMetricFamily("tpuswarm_member_lag_versions", "Versions that it is behind.", labels=["member"])
    for each in status.members:
        up.add_metric([each.id], float(each.is_alive))
        tokens.add_metric([each.id], each.tokens)
        for family, value in ((speed, each.tokens_per_s), (loss, each.loss), (lag, each.lag)):
            if value is not None:
                family.add_metric([each.id], value)
    yield from (up, tokens, speed, loss, lag)


def _fleet(machines: Machines, at: float) -> Iterator[Metric]:
    document, listing, events = machines
    shown = machine_rows(document.desired, listing, events, at)
    wanted = GaugeMetricFamily("tpuswarm_pool_machines_wanted", "Machines that a pool should have.", labels=["pool"])
    for pool in document.desired.pools:
        wanted.add_metric([pool.name], 0 if document.desired.down else pool.count)
    there = GaugeMetricFamily("tpuswarm_pool_machines", "Machines that are there.", labels=["pool", "state"])
    for (name, state), count in sorted(Counter((each.pool, each.state) for each in shown).items()):
        there.add_metric([name, state], count)
    lost = CounterMetricFamily("tpuswarm_machine_preemptions", "Times that it was lost.", labels=["machine"])
    for row in shown:
        lost.add_metric([row.name], row.preemptions)
    yield from (wanted, there, lost)
    rate = running_rate(shown)
    yield _gauge("cost_dollars_per_hour", "What is there now costs so much, where its price is known.", rate.dollars)
    yield _counter(
        "cost_dollars", "What the fleet has cost, by public prices.", total_spending(document, listing, at).dollars
    )


def _chips(hosts: Sequence[Row]) -> Iterator[Metric]:
    labels = ["host", "device"]
    busy = GaugeMetricFamily("tpuswarm_device_duty_cycle_ratio", "Share of time that it computed.", labels=labels)
    used = GaugeMetricFamily("tpuswarm_device_memory_used_bytes", "HBM that is used.", labels=labels)
    total = GaugeMetricFamily("tpuswarm_device_memory_bytes", "HBM of it.", labels=labels)
    for host in hosts:
        for chip in host.chips:
            percent = chip.duty_percent
            values = (None if percent is None else percent / 100), chip.hbm_used_bytes, chip.hbm_total_bytes
            for family, value in zip((busy, used, total), values, strict=True):
                if value is not None:
                    family.add_metric([host.host, str(chip.device)], value)
    yield from (busy, used, total)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tpuswarm_{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"tpuswarm_{name}", what, value=value)


def _known(name: str, what: str, value: float | None) -> Iterator[Metric]:
    """Nothing for what is not known: it is not zero."""
    if value is not None:
        yield _gauge(name, what, value)
