"""Export the state to Prometheus, by its conventions: base units, `_total` for counters, `_ratio` from 0 to 1."""

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

__all__ = ["CONTENT_TYPE", "metrics_text"]
STATES = ("running", "finished", "stopped", "failed", "killed", "not begun")


def metrics_text(state: State, hosts: Sequence[Row]) -> bytes:
    """Return the text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_StateCollector(state, hosts))
    return generate_latest(registry)


class _StateCollector(Collector):
    def __init__(self, state: State, hosts: Sequence[Row]):
        self._state, self._hosts = state, hosts

    def collect(self) -> Iterator[Metric]:
        state = self._state
        yield _gauge("looked_timestamp_seconds", "Time of this state.", state.at)
        if state.url or state.run is not None:
            yield from _run_metrics(state)
        if isinstance(state.run, RunView):
            yield from _swarm_metrics(state.run)
        if state.machines is not None:
            yield from _fleet_metrics(state.machines, state.at)
            yield from _device_metrics(self._hosts)


def _run_metrics(state: State) -> Iterator[Metric]:
    run = state.run
    name = run.run if run else state.url
    about = GaugeMetricFamily("tpuswarm_run_info", "The run.", labels=["run", "recipe"])
    about.add_metric([name, run.recipe if run else ""], 1)
    yield about
    now = run.state if run else "not begun"
    found = GaugeMetricFamily("tpuswarm_run_state", "1 for the current state of the run.", labels=["state"])
    for name in STATES:
        found.add_metric([name], float(name == now))
    yield found
    if run is None:
        return
    yield _gauge("run_step", "The step that the run has reached.", run.step)
    yield _gauge("run_tokens", f"{run.unit.capitalize()} up to this step.", run.tokens)
    yield _gauge("steps_wanted", "Steps of the whole run.", run.steps)
    if run.steps_done is not None and run.tokens_done is not None:
        yield _counter("steps", "Steps done, including repeated ones; of a swarm whole steps counted.", run.steps_done)
        yield _counter("tokens", f"{run.unit.capitalize()} of these steps; of a swarm those counted.", run.tokens_done)
    yield from _gauge_if_known(
        "tokens_per_second", f"{run.unit.capitalize()} per second, of all members.", run.tokens_per_s
    )
    yield from _gauge_if_known("loss", "Training loss; of a swarm the mean of its members' last steps.", run.loss)
    yield from _gauge_if_known("eval_loss", "Loss on held-out rows, at the last evaluation.", run.eval_loss)
    status: Status | object = run if isinstance(run, Status) else run.status
    yield from _gauge_if_known("elapsed_seconds", "Since the run began.", getattr(status, "elapsed", None))
    yield from _gauge_if_known(
        "remaining_seconds", "Until the last step, at the current speed.", getattr(status, "left", None)
    )


def _swarm_metrics(run: RunView) -> Iterator[Metric]:
    status = run.status
    yield from _gauge_if_known("version", "The newest commit.", status.version)
    yield from _gauge_if_known("coordinator_epoch", "Restarts of the coordinator.", status.epoch)
    yield from _gauge_if_known(
        "goodput_ratio", "Counted tokens as a share of those processed and settled.", status.goodput
    )
    yield _gauge("tokens_wanted", "Tokens of the whole run.", status.horizon)
    if status.version is not None:  # else the first process resumes and does not know them yet
        yield _counter("tokens_processed", "Tokens that members trained.", status.tokens.processed)
        yield _counter("tokens_dropped", "Tokens of contributions that were not counted.", status.tokens.dropped)
        yield _counter("carried_bytes", "Bytes between members, aggregators and coordinator.", status.carried)
    yield _gauge("tokens_outstanding", "Tokens trained but not decided yet.", status.tokens.outstanding)
    yield _gauge("tokens_lost", "Tokens of lost work.", status.tokens.lost)
    yield _gauge("alarms", "Active alarms.", len(status.alarms))
    states = GaugeMetricFamily("tpuswarm_members", "Members by state.", labels=["state"])
    counts = Counter(member.state for member in status.members)
    for name in ("alive", "evaluating", "joining", "lost", "left"):
        states.add_metric([name], counts[name])
    yield states
    up = GaugeMetricFamily("tpuswarm_member_up", "1 if the member takes part.", labels=["member"])
    tokens = CounterMetricFamily("tpuswarm_member_tokens", "Tokens that the member trained.", labels=["member"])
    speed = GaugeMetricFamily("tpuswarm_member_tokens_per_second", "Its speed.", labels=["member"])
    loss = GaugeMetricFamily("tpuswarm_member_loss", "Mean of its last 20 steps.", labels=["member"])
    lag = GaugeMetricFamily("tpuswarm_member_lag_versions", "Versions behind the newest.", labels=["member"])
    for member in status.members:
        up.add_metric([member.id], float(member.is_alive))
        tokens.add_metric([member.id], member.tokens)
        for family, value in ((speed, member.tokens_per_s), (loss, member.loss), (lag, member.lag)):
            if value is not None:
                family.add_metric([member.id], value)
    yield from (up, tokens, speed, loss, lag)


def _fleet_metrics(machines: Machines, at: float) -> Iterator[Metric]:
    document, listing, events = machines
    shown = machine_rows(document.desired, listing, events, at)
    wanted = GaugeMetricFamily("tpuswarm_pool_machines_wanted", "Machines that a pool should have.", labels=["pool"])
    for pool in document.desired.pools:
        wanted.add_metric([pool.name], 0 if document.desired.down else pool.count)
    there = GaugeMetricFamily("tpuswarm_pool_machines", "Existing machines.", labels=["pool", "state"])
    for (name, state), count in sorted(Counter((row.pool, row.state) for row in shown).items()):
        there.add_metric([name, state], count)
    lost = CounterMetricFamily("tpuswarm_machine_preemptions", "Times that the machine was lost.", labels=["machine"])
    for row in shown:
        lost.add_metric([row.name], row.preemptions)
    yield from (wanted, there, lost)
    rate = running_rate(shown)
    yield _gauge("cost_dollars_per_hour", "Cost of the existing machines with a known price.", rate.dollars)
    yield _counter(
        "cost_dollars", "Cost of the fleet so far, by public prices.", total_spending(document, listing, at).dollars
    )


def _device_metrics(hosts: Sequence[Row]) -> Iterator[Metric]:
    labels = ["host", "device"]
    busy = GaugeMetricFamily("tpuswarm_device_duty_cycle_ratio", "Share of time spent computing.", labels=labels)
    used = GaugeMetricFamily("tpuswarm_device_memory_used_bytes", "Used HBM.", labels=labels)
    total = GaugeMetricFamily("tpuswarm_device_memory_bytes", "Total HBM.", labels=labels)
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


def _gauge_if_known(name: str, what: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield _gauge(name, what, value)
