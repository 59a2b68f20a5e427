"""What may be deleted, and that nothing else is."""

import os
import random
import uuid
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.chains import SIZES, Run
from tpuswarm.swarm.core.view import View
from tpuswarm.swarm.storage.ledger import header_name
from tpuswarm.swarm.storage.objects import object_name, payload_name
from tpuswarm.swarm.storage.retention import SETTLING, UNNAMED, Holdings, clean, deletable
from tpuswarm.swarm.storage.store import Store

DAY = 24 * 3600.0


def names_of(record):
    return {object_name(digest) for digest in (*record.state, *record.outer, *record.updates)}


def kept(records, limit=4, source=None):
    """Of all records; with a source of chance in two parts, as a run that goes on reads them."""
    found, middle = Holdings(limit), source.randint(1, len(records)) if source else len(records)
    for part in (records[:middle], records[middle:]):
        view = View.of(records[0], records[1 : part[-1].version + 1]) if part else found.view
        found.add(view, part)
    return found


def payloads_of(header):
    return {payload_name(header.identity, fragment) for fragment in range(len(SIZES))}


@settings(max_examples=20)
@given(
    st.randoms(use_true_random=False),
    st.integers(0, 90),
    st.sampled_from([0, 4, 30]),
    st.sampled_from(["plain", "int8"]),
    st.sampled_from(["average", "nesterov"]),
)
def test_what_goes_is_what_the_rule_says(source, commits, limit, downlink, rule):
    run = Run(Store(f"memory://{uuid.uuid4()}"), source, rule=rule, downlink=downlink, arrays=False)
    for _ in range(commits):  # some without a contributor
        header, before = run.push(source.choice(run.members), finite=source.random() > 0.2), run.view
        run.commit()
        if header.finite and source.random() < 0.05:  # a state that was there before
            again = source.choice(run.records)
            run.records[-1] = replace(run.records[-1], state=again.state)
            run.view = before.after(run.records[-1])
    undecided = run.push(run.members[0])
    cut_short = run.push(run.members[1])
    run.headers.remove(cut_short)
    records, newest = run.records, run.records[-1].changes
    stays = {
        name for record in records if newest - record.changes < max(20, limit + 1) for name in names_of(record)
    } | {object_name(digest) for record in records if record.changes % 50 == 0 for digest in record.state}
    named = {name for record in records for name in names_of(record)}
    pushed = [*run.headers, cut_short]
    stored = named | {object_name("unnamed"), *(name for header in pushed for name in payloads_of(header))}
    accepted = {header_name(header.identity) for header in run.headers}.__contains__
    gone = set(deletable(kept(records, limit, source), dict.fromkeys(stored, 2 * DAY), accepted))
    assert not any(
        name.startswith("payloads/")
        for name in deletable(kept(records, limit), dict.fromkeys(payloads_of(cut_short), DAY - 1), accepted)
    )
    assert gone & named == named - stays
    assert object_name("unnamed") in gone
    kept_payloads = payloads_of(undecided)
    decided = {each.identity: record.version for record in records for each in record.decisions}
    for header in run.headers[:-1]:
        decided_at = decided[header.identity]
        if newest - records[decided_at].changes < 20:
            kept_payloads |= payloads_of(header)
    assert {name for name in stored if name.startswith("payloads/")} - gone == kept_payloads
    if commits:
        assert run.view.has_decided(header.identity)


def grown(commits: int) -> Run:
    run = Run(Store(f"memory://{uuid.uuid4()}"), random.Random(0), arrays=False)
    for _ in range(commits):
        run.push(run.members[0])
        run.commit()
    return run


def test_genesis_and_every_fiftieth_stay_for_ever():
    run = grown(150)
    ages = {name: DAY for record in run.records for name in names_of(record)}
    gone = set(deletable(kept(run.records), ages, bool))
    whole = [record.version for record in run.records if not names_of(record) & gone]
    assert whole == [0, 50, 100, *range(131, 151)]


def test_a_larger_staleness_keeps_more():
    run = grown(60)
    ages = {name: DAY for record in run.records for name in names_of(record)}
    gone = set(deletable(kept(run.records, 40), ages, bool))
    assert [record.version for record in run.records if not names_of(record) & gone] == [0, *range(20, 61)]


@pytest.mark.parametrize(
    ("name", "age", "goes"),
    [
        ("unnamed", UNNAMED - 1, False),
        ("unnamed", UNNAMED + 1, True),
        ("old", SETTLING - 1, False),
        ("old", SETTLING + 1, True),
        ("kept", 100 * DAY, False),
    ],
)
def test_ages(name, age, goes):
    """What was written a moment ago may be named in the next: an old state can come back bit for bit."""
    run = grown(60)
    which = {"unnamed": "x", "old": run.records[5].state[0], "kept": run.records[55].state[0]}[name]
    assert deletable(kept(run.records), {object_name(which): age}, bool) == ([object_name(which)] if goes else [])


def test_other_files_are_none_of_its_business():
    run = grown(30)
    ages = dict.fromkeys(["headers/m0-ab-1.json", "commits/000001.json", "members/m0/metrics.jsonl"], 99 * DAY)
    assert deletable(kept(run.records), ages, bool) == []


def test_cleaning_leaves_what_is_needed_to_go_on(tmp_path):
    run = Run(Store(tmp_path), random.Random(0), rule="nesterov").grow(30)
    undecided, cut_short = run.push(run.members[1]), run.push(run.members[2])
    (tmp_path / header_name(cut_short.identity)).unlink()  # its member was killed before it
    run.headers.remove(cut_short)
    run.pending.remove(cut_short)
    (tmp_path / "objects" / ".array.0123.part").write_bytes(b"torn")
    for file in tmp_path.rglob("*"):
        os.utime(file, (1, 1))
    gone = clean(run.store, kept(run.records))
    assert payloads_of(cut_short) <= set(gone) and not any((tmp_path / name).exists() for name in gone)
    assert not list(tmp_path.rglob(".*.part"))
    newest = run.records[-1].changes
    for record in run.records:
        if newest - record.changes < 20:
            for digest in (*record.state, *record.outer):
                run.objects.get_array(digest)
    for fragment, digest in enumerate(undecided.digests):
        run.objects.get_payload(undecided.identity, fragment, digest)
    assert clean(run.store, kept(run.records)) == []
    assert run.ledger.view() == run.view and len(run.ledger.headers()) == len(run.headers)
    run.grow(2)
