"""A member's process: it learns what the run is, compiles, and lives one incarnation after the other."""

import math
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.coordinator import disagreement
from tpuswarm.swarm.core.fragments import Layout
from tpuswarm.swarm.core.member import Adopt, Member
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.swarm.effects import Call, Over, Unreachable
from tpuswarm.swarm.engines.threads import Node
from tpuswarm.swarm.holder import ProgramHolder, layout_of, placed
from tpuswarm.swarm.member import MemberProcesses
from tpuswarm.swarm.runtime.head import Found, Joining
from tpuswarm.swarm.runtime.plan import HEAD, Founding, Plan, code_digest, fill
from tpuswarm.train import platform
from tpuswarm.train.fit import Fitted, fit
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.recipe import Metrics
from tpuswarm.train.run import writing
from tpuswarm.train.session import chosen, held_out, request
from tpuswarm.train.user_code import blame, build_recipe

AGAIN = 0.5
"""Seconds between two tries of a call that nobody answers."""
FILE_PART = 2**23
"""Bytes of a data file fetched at a time."""
INNER_SAVE = 600.0
"""Seconds between two saves of a member's inner state, at least."""
LIVES = 5
"""Incarnations that one process tries without a single accepted step before it gives up."""


@dataclass
class Place:
    """What a member's process was given by who started it."""

    name: str
    plan: Plan
    shards: tuple[str, ...]
    data: Path | None
    """The run's data files; None where they have to be fetched."""
    steps: int
    """That this member made before."""
    evaluates: bool
    calls: Callable[[Call], Any]
    say: Callable[[str], None]


@dataclass
class MemberHost:
    """The process; `run` in one thread, `look` and `leave` from others."""

    place: Place
    _rows: "Rows" = field(init=False)
    _member: MemberProcesses | None = None
    _leaving: bool = False

    def __post_init__(self) -> None:
        self._rows = Rows(self.place.name, self.place.steps, self.place.plan, self._version)

    def _version(self) -> int:
        return self._member.books.base if self._member else 0

    def serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """A member dials out; nobody calls it."""
        raise Unreachable(self.place.name)

    def leave(self) -> None:
        """Hand in what is done, give the rest back, and go."""
        self._leaving = True
        if self._member:
            self._member.leaving = True

    def look(self, since: int) -> dict[str, Any]:
        """How it stands, with its rows of metrics from number `since` on; those before are forgotten."""
        member = self._member
        books = member.books if member else None
        rows = self._rows.since(since)
        return {
            "incarnation": books.incarnation.name if books else None,
            "base": books.base if books else None,
            "tokens": books.processed if books else 0,
            "at_risk": member.at_risk * member.books.terms.tokens_per_row if member else 0,
            "rows_per_s": member.rows_per_s if member else None,
            "rows": rows,
        }

    def run(self) -> str:
        """Until the run ends (`ended`) or this member was asked to leave (`left`); raises RunFailed and InputError."""
        place, plan = self.place, self.place.plan
        data = self._fetch_files()
        recipe = build_recipe(plan.target, plan.options | fill(plan.shared, data))
        with blame(f"the data of {recipe.name} failed"):
            source = recipe.data("train")
        place.say(f"{recipe.name}: compiling")
        platform.prepare(bool(plan.settings["deterministic"]))
        fitted = fit(recipe, request(plan.settings), platform.local_devices())
        layout = layout_of(fitted, plan.swarm.fragments)
        digests = Digests(layout.digest, plan.config, getattr(source, "digest", ""), code_digest(plan.target))
        init_key, step_key = jax.random.split(jax.random.key(plan.settings["seed"]))
        place.say(f"compiled: {fitted.choice.why}")
        validation = held_out(recipe, required=False) if place.evaluates else None

        def make_holder(fragments: list[np.ndarray]) -> ProgramHolder:
            state = fitted.init(init_key, placed(fitted, layout, fragments))
            form, took = plan.swarm.quantize, self._rows.took
            return ProgramHolder(fitted, source, layout, form, step_key, state, fragments, took, validation)

        fruitless = 0
        while not self._leaving:
            joining = self._hello(fitted, layout, init_key)
            if joining is None:
                break
            if digests != joining.terms.digests:
                raise InputError(f"{place.name} cannot join: {disagreement(digests, joining.terms.digests)}")
            reason = self._live(joining, digests, make_holder)
            if reason is None:
                return "ended"
            place.say(f"its incarnation is over: {reason}")
            member, self._member = self._member, None  # and with it what it held on the devices
            fruitless = 0 if member and member.books.sequence else fruitless + 1
            if fruitless >= LIVES:
                raise RunFailed(f"{place.name} gave up after {LIVES} lives without a contribution, the last: {reason}")
        return "left"

    def _live(
        self, joining: Joining, digests: Digests, make_holder: Callable[[list[np.ndarray]], ProgramHolder]
    ) -> str | None:
        """One incarnation; why it is over, None at the end of the run."""
        place, swarm = self.place, self.place.plan.swarm
        incarnation = Incarnation(place.name, secrets.token_hex(16))
        terms = replace(joining.terms, digests=digests)
        books = Member(terms, swarm.quantize, swarm.overlap, incarnation, joining.version, joining.tokens)
        anchor = self._fetch(joining.state)
        holder = make_holder(anchor)
        place.say(f"incarnation {incarnation.name[:8]} starts from version {joining.version}")
        node = Node(place.calls)
        self._member = member = MemberProcesses(
            books,
            holder,
            HEAD,
            place.shards,
            time.monotonic,
            anchor=None if swarm.quantize == "plain" else anchor,
            say=place.say,
            leaving=self._leaving,
            inner_save=INNER_SAVE,
            evaluate_every=place.plan.evaluate_every if place.evaluates else None,
            evaluated=self._rows.evaluated,
        )
        member.leaving = self._leaving  # it may have been asked while the member was made
        node.start("train", member.train())
        node.start("exchange", member.exchange())
        node.start("heartbeats", member.heartbeats())
        node.wait()
        if node.failure is None or member.ended:
            if place.evaluates:
                self._last_evaluation(holder)
            return None
        if isinstance(node.failure, Over | Unreachable):
            return str(node.failure)
        raise node.failure

    def _last_evaluation(self, holder: ProgramHolder) -> None:
        """Of the run's last version, which nobody had to adopt; none where nothing is held out."""
        if not holder.can_evaluate:
            return
        last = self._answer(Call(HEAD, "hello", (self.place.name,)))
        self.place.say(f"evaluating version {last.version}")
        version = holder.place(self._fetch(last.state))
        holder.adopt(Adopt("take", None, last.version, last.state), version)
        found = holder.evaluate(last.terms.batch, lambda: self._leaving)
        if found:
            self._rows.evaluated(last.version, last.tokens, *found)

    def _fetch(self, state: tuple[str, ...]) -> list[np.ndarray]:
        """The fragments of a version."""
        return [
            self._answer(Call(self._shard(number), "fetch", (number, digest))) for number, digest in enumerate(state)
        ]

    def _hello(self, fitted: Fitted, layout: Layout, key: jax.Array) -> Joining | None:
        """What the run is, from the coordinator; makes the first state where asked to. None when told to leave."""
        while not self._leaving:
            answer = self._answer(Call(HEAD, "hello", (self.place.name,)))
            if isinstance(answer, Joining):
                return answer
            if isinstance(answer, Found):
                self.place.say("making the first state")
                shared = fitted.program.exchange().get(fitted.init(key, None))
                arrays = dict(zip(leaf_paths(shared), jax.device_get(jax.tree.leaves(shared)), strict=True))
                outer = self.place.plan.outer
                made = [
                    self._answer(Call(self._shard(number), "found", (fragment, outer)))
                    for number, fragment in enumerate(layout.split(arrays))
                ]
                state = tuple(digest for digest, _ in made)
                outer_state = tuple(digest for _, digest in made if digest)
                self._answer(Call(HEAD, "found", (Founding(layout.fragments, chosen(fitted)), state, outer_state)))
            time.sleep(AGAIN)
        return None

    def _fetch_files(self) -> Path:
        """The folder of the run's data files, fetched from the shards where they are not there."""
        place = self.place
        folder = place.data or platform.cache_folder("swarm") / place.plan.swarm.run
        for name, size in place.plan.files.items():
            path = folder / name
            if path.exists() and path.stat().st_size == size:
                continue
            place.say(f"fetching {name}, {size / 2**20:.1f} MiB")
            path.parent.mkdir(parents=True, exist_ok=True)
            with writing(path), tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
                for start in range(0, size, FILE_PART):
                    part.write(self._answer(Call(place.shards[0], "file", (name, start, FILE_PART))))
                Path(part.name).rename(path)
        return folder

    def _shard(self, fragment: int) -> str:
        return self.place.shards[fragment % len(self.place.shards)]

    def _answer(self, call: Call) -> Any:
        """What a call returns, tried until somebody answers."""
        while True:
            try:
                return self.place.calls(call)
            except Unreachable:
                time.sleep(AGAIN)


class Rows:
    """Rows of metrics, read from the devices by a thread of its own as their steps end."""

    def __init__(self, name: str, steps: int, plan: Plan, version: Callable[[], int]):
        """steps: that this member made before; version: the one it has adopted."""
        self._version = version
        self._name, self._steps, self._tokens = name, steps, int(plan.settings["batch"]) * plan.tokens_per_row
        self._pending: queue.SimpleQueue[tuple[int, Metrics]] = queue.SimpleQueue()
        self._rows: list[dict[str, Any]] = []
        self._first = 0
        self._began = self._read_at = time.monotonic()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="metrics", daemon=True).start()

    def took(self, number: int, metrics: Metrics) -> None:
        """A step was dispatched; its metrics are still on the devices."""
        self._pending.put((self._version(), metrics))

    def evaluated(self, version: int, tokens: int, values: dict[str, float], rows: int) -> None:
        """A version was evaluated."""
        row: dict[str, Any] = {"step": self._steps, "tokens": tokens, "eval_rows": rows}
        row |= {f"eval_{name}": value if math.isfinite(value) else None for name, value in values.items()}
        with self._lock:
            self._rows.append(row | {"member": self._name, "version": version})

    def since(self, number: int) -> list[dict[str, Any]]:
        """Rows from `number` on, counted from 0; those before are forgotten."""
        with self._lock:
            self._rows = self._rows[max(0, number - self._first) :]
            self._first = max(number, self._first)
            return list(self._rows)

    def _read(self) -> None:
        while True:
            version, metrics = self._pending.get()
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            now = time.monotonic()
            self._steps += 1
            row = {
                "step": self._steps,
                "tokens": self._steps * self._tokens,
                **{name: value if math.isfinite(value) else None for name, value in values.items()},
                "tokens_per_s": self._tokens / max(now - self._read_at, 1e-9),
                "wall_s": now - self._began,
                "member": self._name,
                "version": version,
            }
            self._read_at = now
            with self._lock:
                self._rows.append(row)
