"""Which arrays may be deleted, and that no other is."""

import errno
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.chains import SIZES, Run, memory_store, object_names, problems_of
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.storage.ledger import header_name
from tpuswarm.swarm.storage.objects import object_name, payload_name
from tpuswarm.swarm.storage.retention import MIN_AGE_S, UNNAMED_RETENTION_S, Holdings, clean, deletable
from tpuswarm.swarm.storage.store import Store

DAY = 24 * 3600.0


def payloads_of(header):
    return {payload_name(header.identity, fragment) for fragment in range(len(SIZES))}


def holdings(records, limit=4, middle=None):
    """Holdings of all records. middle: they are added in two parts, as a run that goes on reads them."""
    found, middle = Holdings(limit), middle or len(records)
    for part in (records[:middle], records[middle:]):
        view = LedgerView.from_records(records[0], records[1 : part[-1].version + 1]) if part else found.view
        found.add(view, part)
    return found


@settings(max_examples=20)
@given(
    st.integers(0, 10**9),
    st.integers(0, 90),
    st.sampled_from([0, 4, 30]),
    st.sampled_from(["plain", "int8"]),
    st.sampled_from(["average", "nesterov"]),
)
def test_deletable_arrays_are_those_of_the_rule(seed, commits, limit, downlink, rule):
    source = random.Random(seed)
    run = Run(memory_store(), source, rule=rule, downlink=downlink, arrays=False)
    for _ in range(commits):  # some without a contributor
        header, before = run.push(source.choice(run.members), finite=source.random() > 0.2), run.view
        run.commit()
        if header.finite and source.random() < 0.05:  # an earlier state comes back
            again = source.choice(run.records)
            run.records[-1] = replace(run.records[-1], state=again.state)
            run.view = before.after(run.records[-1])
    undecided = run.push(run.members[0])
    without_header = run.push(run.members[1])
    run.headers.remove(without_header)
    records, newest = run.records, run.records[-1].changes
    named = object_names(*records)
    needed = object_names(*(record for record in records if newest - record.changes < max(20, limit + 1)))
    needed |= {object_name(digest) for record in records if record.changes % 50 == 0 for digest in record.state}
    payloads = {name for header in (*run.headers, without_header) for name in payloads_of(header)}
    others = {"headers/m0-ab-1.json", "commits/000001.json", "members/m0/metrics.jsonl"}
    stored = named | payloads | others | {object_name("unnamed")}
    accepted = {header_name(header.identity) for header in run.headers}.__contains__
    held = holdings(records, limit, source.randint(1, len(records)))
    young = deletable(held, dict.fromkeys(payloads_of(without_header), DAY - 1), accepted)
    assert not any(name.startswith("payloads/") for name in young)
    gone = set(deletable(held, dict.fromkeys(stored, 2 * DAY), accepted))
    assert gone & named == named - needed and object_name("unnamed") in gone and not gone & others
    decided = {decision.identity: record for record in records for decision in record.decisions}
    needed_payloads = payloads_of(undecided)
    for header in run.headers[:-1]:
        if newest - decided[header.identity].changes < 20:
            needed_payloads |= payloads_of(header)
    assert payloads - gone == needed_payloads


@pytest.fixture(scope="module")
def records():
    run = Run(memory_store(), random.Random(0), arrays=False)
    for _ in range(60):
        run.push(run.members[0])
        run.commit()
    return run.records


@pytest.mark.parametrize(
    ("version", "age", "goes"),
    [
        (None, UNNAMED_RETENTION_S - 1, False), (None, UNNAMED_RETENTION_S + 1, True),
        (5, MIN_AGE_S - 1, False), (5, MIN_AGE_S + 1, True),
        (50, 100 * DAY, False), (55, 100 * DAY, False),
    ],
)  # fmt: skip
def test_young_objects_stay(records, version, age, goes):
    """The next commit may name them: an old state can come back bit for bit."""
    name = object_name("unnamed" if version is None else records[version].state[0])
    assert deletable(holdings(records), {name: age}, bool) == ([name] if goes else [])


def test_file_that_cannot_be_deleted_keeps_no_other(tmp_path, monkeypatch):
    run = Run(Store(tmp_path), random.Random(0), rule="nesterov").grow(30)
    for file in tmp_path.rglob("*"):
        os.utime(file, (1, 1))
    first, *others = deletable(holdings(run.records), run.store.ages(""), run.store.exists)
    unlink = Path.unlink

    def fail_if_busy(path, missing_ok=False):
        if path == tmp_path / first:
            raise OSError(errno.EBUSY, "Device or resource busy")
        unlink(path, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(RunFailed, match=f"{first} in .* could not be deleted"):
        patch.setattr(Path, "unlink", fail_if_busy)
        clean(run.store, holdings(run.records))
    assert others and (tmp_path / first).exists() and not any((tmp_path / name).exists() for name in others)


def test_cleaned_run_goes_on(tmp_path):
    run = Run(Store(tmp_path), random.Random(0), rule="nesterov").grow(30)
    without_header = run.push(run.members[2])
    (tmp_path / header_name(without_header.identity)).unlink()  # its member was killed before it
    run.headers.remove(without_header)
    run.pending.remove(without_header)
    (tmp_path / "objects" / ".array.0123.part").write_bytes(b"torn")
    for file in tmp_path.rglob("*"):
        os.utime(file, (1, 1))
    gone = clean(run.store, holdings(run.records))
    assert payloads_of(without_header) <= set(gone) and not any((tmp_path / name).exists() for name in gone)
    assert not list(tmp_path.rglob(".*.part"))
    assert clean(run.store, holdings(run.records)) == []
    run.grow(2)
    assert not problems_of(run.store)


@pytest.mark.parametrize("kept", [20, 35, None])
def test_payloads_are_kept_as_long_as_asked(kept):
    run = Run(memory_store(), random.Random(5), arrays=False)
    for _ in range(60):
        run.push(run.random.choice(run.members))
        run.commit()
    found = Holdings(4, kept)
    for first in (0, 41):
        records = run.records[first : first + 41]
        found.add(LedgerView.from_records(run.records[0], run.records[1 : records[-1].version + 1]), records)
    restarted = Holdings(4, kept)
    restarted.follow(run.ledger, run.view)
    newest = run.records[-1].changes
    for each in (found, restarted):
        is_expired = each.expired()
        for record in run.records:
            for decision in record.decisions:
                is_old = kept is not None and newest - record.changes >= kept
                assert is_expired(header_name(decision.identity)) == is_old
