"""Random runs with the product's own ledger, verdicts and arithmetic, but without members."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from tests.swarm.exact import TERMS, genesis
from tests.swarm.memory_store import MemoryStore
from tpuswarm.swarm.core.arithmetic.merge import CHUNK_SIZE
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage, OuterRule, advance_quorum, initial_state
from tpuswarm.swarm.core.arithmetic.quantize import encode
from tpuswarm.swarm.core.choose import Staleness, choose, effective
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.messages import Merge
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Header, Identity, Incarnation, Record
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, object_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify

PER_ROW = 8
"""Tokens of a row."""
SIZES = (300, 0, CHUNK_SIZE + 5)
"""Elements of each fragment."""
FORMS = {"plain": None, "int8": 8, "int4": 4}
FATES = ("applied", "returned", "dropped", "void")


def memory_store() -> Store:
    return MemoryStore()


class Run:
    """A run in a store, grown commit by commit. Without `arrays`, states are random digests and nothing else."""

    def __init__(
        self, store: Store, random: Random, *, rule: str = "average", downlink: str = "plain", arrays: bool = True,
        average: MovingAverage | None = None,
    ):  # fmt: skip
        self.store, self.random, self.arrays = store, random, arrays
        self.ledger, self.objects = Ledger(store), Objects(store)
        self.outer = OuterRule(rule, downlink=downlink, average=average)
        self.numbers = np.random.default_rng(random.getrandbits(32))
        self.staleness = Staleness()
        self.members = [Incarnation(f"m{number}", f"{random.getrandbits(128):032x}") for number in range(4)]
        self.sequences, self.processed = dict.fromkeys(self.members, 0), dict.fromkeys(self.members, 0)
        self.next_row = 0
        self.pending: list[Header] = []
        self.headers: list[Header] = []
        state = [self.numbers.standard_normal(size).astype(np.float32) for size in SIZES]
        outer = [rows for fragment in state if (rows := initial_state(self.outer, fragment)) is not None]
        first = genesis(
            TERMS, state=self.put(state), outer=self.put(outer), rule=rule, rate=0.0, share=0.0,
            momentum=self.outer.momentum, downlink=downlink, kept=None if average is None else 1.0,
        )  # fmt: skip
        assert self.ledger.append(first) in ("created", "same")
        self.records = [first]
        self.view = LedgerView.from_records(first)

    def put(self, arrays: list[np.ndarray]) -> tuple[str, ...]:
        if self.arrays:
            return tuple(self.objects.put_array(array) for array in arrays)
        return tuple(hashlib.sha256(self.random.randbytes(8)).hexdigest() for _ in arrays)

    def state(self, version: int) -> list[np.ndarray]:
        return [self.objects.get_array(digest) for digest in self.records[version].state]

    def push(self, member: Incarnation, base: int | None = None, *, finite: bool = True, late: bool = False) -> Header:
        """Store a contribution of a member. late: it repeats row 0, which an earlier push may have had."""
        random, form = self.random, self.random.choice(list(FORMS))
        self.sequences[member] += 1
        start, length = self.next_row, random.randint(1, 5)
        self.next_row += length + random.choice([0, 0, 2])
        rows = Rows.from_ranges((start, start + length)) | Rows.from_ranges(*[(0, 1)] * late)
        base = self.view.version if base is None else base
        identity = Identity(member, self.sequences[member])
        digests: tuple[str, ...] = ("",) * len(SIZES)
        norm = random.choice([0.5, 1.0, 20.0])
        if self.arrays:
            anchors = self.state(base)
            deltas = [self.numbers.standard_normal(anchor.size).astype(np.float32) for anchor in anchors]
            payloads = [_payload(*pair, FORMS[form]) for pair in zip(anchors, deltas, strict=True)]
            digests = tuple(self.objects.put_payload(identity, *numbered) for numbered in enumerate(payloads))
            norm = float(np.sqrt(sum(float((delta**2).sum()) for delta in deltas)))
        tokens = len(rows) * PER_ROW
        self.processed[member] += tokens
        header = Header(identity, "run", base, rows, tokens, 1, form, norm if finite else 0.0, finite, digests)
        assert self.ledger.create_header(header) == "created"
        self.pending.append(header)
        self.headers.append(header)
        return header

    def commit(self, lost: set[Identity] = frozenset()) -> Record:
        decisions = choose(self.view, self.pending, lost, self.staleness)
        self.pending = []
        counted = [decision for decision in decisions if decision.fate == "applied"]
        newest, weights = self.view.newest, [decision.weight for decision in counted]
        rate = self.outer.rate_for(effective(weights)) if weights else 0.0
        share, gathered = advance_quorum(self.outer, newest.gathered, len(weights), quorum=2)
        tokens = sum(decision.tokens for decision in counted)
        average, kept = self.outer.average, newest.kept
        kept = average.kept(tokens, newest.tokens + tokens) if average and tokens else kept
        record = replace(
            newest, version=newest.version + 1, epoch=newest.epoch + (self.random.random() < 0.1),
            parent=self.ledger.digest(newest), decisions=tuple(decisions), rate=rate, share=share, gathered=gathered,
            tokens=newest.tokens + tokens, kept=kept,
            changes=newest.changes + bool(weights), processed=tuple(sorted(self.processed.items())),
            time=newest.time + self.random.random(), updates=(),
        )  # fmt: skip
        if weights and self.arrays:
            aggregator = Aggregator(self.ledger, self.objects, SIZES, 0, 1)
            part = next(aggregator.merge(newest, merge_of(record, self.outer))).action()
            state, outer, updates = in_order(part.state), in_order(part.outer), in_order(part.updates)
            record = replace(record, state=state, outer=outer, updates=updates)
        elif weights:
            sent = () if self.outer.downlink == "plain" else self.put([None] * len(SIZES))
            record = replace(record, state=self.put([None] * len(SIZES)), updates=sent)
        assert self.ledger.append(record) == "created"
        self.records.append(record)
        self.view = self.view.after(record)
        return record

    def grow(self, commits: int) -> "Run":
        """Add commits with random pushes: stale, not finite, late, and some with lost payloads."""
        for _ in range(commits):
            for member in self.random.sample(self.members, self.random.randint(1, len(self.members))):
                base = max(0, self.view.version - self.random.choice([0, 0, 0, 1, 2, 6]))
                self.push(member, base, finite=self.random.random() > 0.1, late=self.random.random() < 0.1)
            lost = {header.identity for header in self.pending if self.random.random() < 0.1}
            self.commit(lost)
        return self


def merge_of(record: Record, outer: OuterRule) -> Merge:
    return Merge(
        record.version, record.decisions, outer, record.rate, record.share, record.gathered, record.kept, reason=""
    )


def in_order(digests: dict[int, str]) -> tuple[str, ...]:
    return tuple(digests[number] for number in sorted(digests))


def applied(record: Record) -> list[Decision]:
    return [decision for decision in record.decisions if decision.fate == "applied"]


def object_names(*records: Record) -> set[str]:
    return {object_name(digest) for record in records for digest in record.objects}


def problems_of(store: Store) -> list[str]:
    return verify(store, lambda _: None).problems


def _payload(anchor: np.ndarray, delta: np.ndarray, bits: int | None) -> dict[str, np.ndarray]:
    if bits is None:
        return {"s": anchor - delta}
    codes, scales = encode(delta, bits)
    return {"codes": codes, "scales": scales}


def counted_naively(records: list[Record]) -> dict:
    """Count the records with Python sets of rows."""
    books: dict = {"counted": set(), "skipped": set(), "members": {}, "tokens": dict.fromkeys(FATES, 0), "changes": 0}
    for record in records:
        books["changes"] += any(decision.fate == "applied" for decision in record.decisions)
        for decision in record.decisions:
            rows = {row for start, stop in decision.rows.ranges for row in range(start, stop)}
            if decision.fate == "applied":
                assert not rows & (books["counted"] | books["skipped"])
                books["counted"] |= rows
            elif decision.fate == "dropped":
                books["skipped"] |= rows
            books["tokens"][decision.fate] += len(rows) * PER_ROW
            name = decision.identity.incarnation.member
            member = books["members"].setdefault(name, dict.fromkeys(("n", *FATES), 0))
            member["n"] += 1
            member[decision.fate] += len(rows) * PER_ROW
    return books


def edit_file(store: Store, name: str, edit: Callable[[dict], object]) -> None:
    """Change the content of a ledger file, and its digest with it."""
    value = json.loads(store.read(name))["record"]
    edit(value)
    body = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    store.path(name).write_bytes(b'{"record":' + body + b',"sha256":"' + digest + b'"}\n')


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
