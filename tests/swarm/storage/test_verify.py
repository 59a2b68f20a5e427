"""`verify` accepts a sound run and reports every kind of damage."""

import gc
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.swarm.chains import SIZES, Run, applied, flip_bit, problems_of
from tests.swarm.exact import TERMS, genesis
from tests.swarm.storage.test_retention import holdings
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage
from tpuswarm.swarm.storage import verify as verification
from tpuswarm.swarm.storage.bookmark import bookmark_name
from tpuswarm.swarm.storage.ledger import Ledger, commit_name, header_name
from tpuswarm.swarm.storage.objects import Objects, object_name, payload_name
from tpuswarm.swarm.storage.retention import clean
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import Report, newest_whole, verify
from tpuswarm.swarm.views.events import commit_event
from tpuswarm.train.run.directory import append_event


@pytest.fixture(scope="module", params=["average-plain", "nesterov-int8-ema"])
def sound(request, tmp_path_factory):
    """A run of 12 commits with one undecided contribution."""
    rule, downlink, *ema = request.param.split("-")
    folder, average = tmp_path_factory.mktemp(rule), MovingAverage(half_life=100) if ema else None
    run = Run(Store(folder), random.Random(4), rule=rule, downlink=downlink, average=average).grow(12)
    run.push(run.members[0])
    return run


@pytest.fixture
def run(sound, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(sound.store.root, folder)
    made = object.__new__(Run)
    made.__dict__.update(sound.__dict__, store=Store(folder))
    return made


def report(run: Run) -> Report:
    return verify(run.store, lambda _: None)


def with_contributors(run: Run) -> list[int]:
    return [record.version for record in run.records if applied(record)]


def flip(path: Path) -> None:
    flip_bit(path, random.Random(path.name).randrange(path.stat().st_size * 8))


def test_intact_run_verifies(run):
    progress: list[str] = []
    found = verify(run.store, progress.append)
    assert not found.problems and found.newest == 12
    assert found.recomputed == with_contributors(run) and found.not_recomputed == {}
    decisions = [decision for record in run.records for decision in record.decisions]
    for fate in ("applied", "dropped"):
        assert getattr(found, fate) == sum(decision.tokens for decision in decisions if decision.fate == fate)
    assert found.undecided == run.headers[-1].tokens
    assert found.processed == sum(dict(run.records[-1].processed).values())
    assert newest_whole(run.store) == 12
    assert progress[0] == "reading the records" and "recomputing fragment 3 of 3" in progress


def test_state_that_is_not_finite_is_a_problem(tmp_path):
    """As an earlier version of tpuswarm could commit it."""
    store = Store(tmp_path)
    state = tuple(Objects(store).put_array(np.full(3, value, np.float32)) for value in (1.0, np.nan))
    Ledger(store).append(genesis(TERMS, state=state))
    [problem] = verify(store, lambda _: None).problems
    assert problem.startswith("commits/000000.json, fragment 1: its state is not finite")
    with pytest.raises(RunFailed, match=r"no commit in .* is intact"):
        newest_whole(store)


def test_rolled_back_ledger_is_a_problem(run):
    """The chain of the rest is sound; only the events know more."""
    append_event(Path(run.store.root), "commit", **commit_event(run.records[12]))
    append_event(Path(run.store.root), "commit", reversion=13)  # a damaged row says nothing
    assert report(run).problems == []
    run.store.delete(commit_name(12))
    assert "events.jsonl announces commit 12; commits/000012.json is missing" in report(run).problems


def test_commits_whose_arrays_were_deleted_are_not_recomputed(tmp_path):
    run = Run(Store(tmp_path), random.Random(1)).grow(30)
    for file in tmp_path.rglob("*"):
        os.utime(file, (1, 1))
    gone = clean(run.store, holdings(run.records))
    found = report(run)
    assert found.problems == []
    assert sorted([*found.recomputed, *found.not_recomputed]) == with_contributors(run)
    assert len(found.recomputed) >= 10 and max(found.not_recomputed) < min(found.recomputed) + 6
    for reason in found.not_recomputed.values():
        assert re.fullmatch(r"(the state of commit \d+|payloads/.*) is gone", reason)
    assert len(gone) > 50


def test_long_history_is_read_without_collecting_garbage_and_without_recomputing_what_is_gone(tmp_path, monkeypatch):
    run = Run(Store(tmp_path), random.Random(1)).grow(12)
    for record in run.records[:6]:
        for digest in record.state:
            run.store.delete(object_name(digest))
    replayed, collections = [], {}
    original = verification.replay
    monkeypatch.setattr(verification, "replay", lambda *given: replayed.append(given[2]) or original(*given))
    before = gc.get_threshold()
    gc.set_threshold(1)  # as many objects as a long history has
    try:
        verify(run.store, lambda step: collections.setdefault(step, gc.get_stats()[0]["collections"]))
    finally:
        gc.set_threshold(*before)
    assert collections["reading the headers"] - collections["reading the records"] < 20 and gc.isenabled()
    assert min(replayed) > 6


@pytest.mark.parametrize("step", ["reading the records", "reading the headers", "recomputing fragment 2 of 3"])
def test_run_that_goes_on_meanwhile_is_sound(tmp_path, step):
    run = Run(Store(tmp_path), random.Random(2)).grow(12)

    def grow_and_clean(current):
        if current == step:
            run.grow(25)
            for file in tmp_path.rglob("*"):
                os.utime(file, (1, 1))
            assert clean(run.store, holdings(run.records))

    assert verify(run.store, grow_and_clean).problems == []


DAMAGES = {
    "flip": flip,
    "tear": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "delete": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damaged_file_is_named(run, damage):
    Ledger(run.store).bookmark(run.view)
    kinds: dict[str, list[Path]] = {}
    root = Path(run.store.root)
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        kinds.setdefault(path.relative_to(root).parts[0], []).append(path)
    assert sorted(kinds) == ["commits", "headers", "objects", "payloads", "views"]
    identities = [decision.identity for record in run.records for decision in applied(record)]
    identities.append(run.headers[-1].identity)
    needed = {payload_name(identity, fragment) for identity in identities for fragment in range(len(SIZES))}
    # Without one of these the run looks as it did before that file was written.
    newest = {commit_name(12), header_name(run.headers[-1].identity), bookmark_name(12)}
    for kind, paths in kinds.items():
        for path in random.Random(1).sample(paths, min(3, len(paths))):
            name, whole = path.relative_to(root).as_posix(), path.read_bytes()
            DAMAGES[damage](path)
            problems = problems_of(run.store)
            expected = damage != "delete" or (name in needed if kind == "payloads" else name not in newest)
            assert any(name in problem for problem in problems) == expected, (name, problems)
            path.write_bytes(whole)
    assert not problems_of(run.store)


def test_newest_version_with_all_its_arrays_is_found(run):
    last = with_contributors(run)[-1]
    before = next(record.version for record in reversed(run.records) if record.state != run.records[last].state)
    flip(run.store.path(object_name(run.records[last].state[2])))
    assert newest_whole(run.store) == before
    for folder in ("objects", "commits"):
        shutil.rmtree(Path(run.store.root) / folder)
        with pytest.raises(RunFailed, match=r"no commit in .* is intact; restore a copy of commits/ and objects/"):
            newest_whole(run.store)
    found = report(run)
    assert found.newest is None and "commits/000000.json is missing" in found.problems[0]


def test_records_after_a_damaged_one_are_unproven(run):
    flip(run.store.path(commit_name(7)))
    found = report(run)
    assert found.newest == 6 and "6 records from commits/000007.json on are unproven" in found.problems
    assert newest_whole(run.store) == 6
    run.store.delete(commit_name(3))
    found = report(run)
    assert found.newest == 2 and any("commits/000003.json is missing" in problem for problem in found.problems)


def test_push_that_no_commit_decided_although_a_later_one_was_is_reported(run):
    skipped = replace(run.headers[0], identity=replace(run.headers[0].identity, sequence=0))
    Ledger(run.store).create_header(skipped)
    words = f"{header_name(skipped.identity)} has no verdict, but a later push of its member has one"
    assert words in problems_of(run.store)


def rewrite(run: Run, version: int, change) -> Run:
    """Change a record and build the chain after it again: each file is right, the content is not."""
    records = [*run.records[:version], change(run.records[version]), *run.records[version + 1 :]]
    for number in range(version, len(records)):
        records[number] = replace(records[number], parent=run.ledger.digest(records[number - 1]))
        run.store.delete(commit_name(number))
        assert Ledger(run.store).append(records[number]) == "created"
    run.records = records
    return run


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (lambda it: replace(it, weight=it.weight * 0.99), ["weights add up to 0.9", "recomputed, it is a different"]),
        (lambda it: replace(it, base=it.base + 90), ["disagree: rows, tokens or base differ"]),
        (lambda it: replace(it, identity=replace(it.identity, sequence=77)), ["77.json is missing, but .* lists it"]),
    ],
    ids=["weight", "base", "header"],
)
def test_wrong_decision_is_found(run, change, problems):
    version = with_contributors(run)[1]

    def change_first(record):
        decision = applied(record)[0]
        decisions = tuple(change(other) if other is decision else other for other in record.decisions)
        return replace(record, decisions=decisions)

    found = report(rewrite(run, version, change_first))
    for words in problems:
        assert any(commit_name(version) in problem and re.search(words, problem) for problem in found.problems)
    assert version not in found.recomputed and version in found.not_recomputed


def test_wrong_state_is_found_by_recomputing(run):
    last = with_contributors(run)[-1]
    fragment = run.state(run.records[last].version)[0]
    digest = Objects(run.store).put_array(np.nextafter(fragment, np.float32(9)))
    for version in range(last, len(run.records)):  # records without contributors repeat it
        rewrite(run, version, lambda record: replace(record, state=(digest, *record.state[1:])))
    found = report(run)
    assert found.problems == [f"{commit_name(last)}, fragment 0: recomputed, it is a different state"]
    assert found.recomputed == with_contributors(run)[:-1]
