"""What verification finds: a run as it should be, and every kind of damage to it."""

import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.swarm.chains import SIZES, Run
from tests.swarm.storage.test_retention import kept
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.arithmetic.outer import Average
from tpuswarm.swarm.storage.bookmark import bookmark_name
from tpuswarm.swarm.storage.ledger import Ledger, commit_name, header_name
from tpuswarm.swarm.storage.objects import Objects, object_name, payload_name
from tpuswarm.swarm.storage.retention import clean
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import Report, newest_whole, verify


@pytest.fixture(scope="module", params=["average-plain", "nesterov-plain", "nesterov-int8", "nesterov-int8-ema"])
def sound(request, tmp_path_factory):
    """A run of 12 commits with one contribution undecided."""
    rule, downlink, *ema = request.param.split("-")
    folder, average = tmp_path_factory.mktemp(rule), Average(half_life=100) if ema else None
    run = Run(Store(folder), random.Random(4), rule=rule, downlink=downlink, average=average).grow(12)
    run.push(run.members[0])
    return run


@pytest.fixture
def run(sound, tmp_path):
    """A copy that may be damaged; its records and headers are those of `sound`."""
    folder = tmp_path / "run"
    shutil.copytree(sound.store.root, folder)
    made = object.__new__(Run)
    made.__dict__.update(sound.__dict__, store=Store(folder))
    return made


def report(run: Run) -> Report:
    return verify(run.store, lambda _: None)


def applied(run: Run, version: int):
    return [each for each in run.records[version].decisions if each.fate == "applied"]


def with_contributors(run: Run) -> list[int]:
    return [record.version for record in run.records if applied(run, record.version)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    bit = random.Random(path.name).randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_sound_run(run):
    said: list[str] = []
    found = verify(run.store, said.append)
    assert found.problems == [] and found.newest == 12
    assert found.recomputed == with_contributors(run) and found.not_recomputed == {}
    decisions = [each for record in run.records for each in record.decisions]
    assert found.applied == sum(each.tokens for each in decisions if each.fate == "applied")
    assert found.dropped == sum(each.tokens for each in decisions if each.fate == "dropped")
    assert found.undecided == run.headers[-1].tokens
    assert found.processed == sum(dict(run.records[-1].processed).values())
    assert newest_whole(run.store) == 12
    assert said[0] == "reading the records" and "recomputing fragment 3 of 3" in said


def test_in_every_kind_of_place(store):
    run = Run(store, random.Random(7), rule="nesterov").grow(3)
    found = report(run)
    assert found.problems == [] and found.recomputed == with_contributors(run)
    assert newest_whole(store) == 3


def test_after_retention_it_says_what_it_could_not_do(tmp_path):
    run = Run(Store(tmp_path), random.Random(1)).grow(30)
    for file in tmp_path.rglob("*"):
        os.utime(file, (1, 1))
    gone = clean(run.store, kept(run.records))
    found = report(run)
    assert found.problems == []
    assert sorted([*found.recomputed, *found.not_recomputed]) == with_contributors(run)
    assert len(found.recomputed) >= 10 and max(found.not_recomputed) < min(found.recomputed) + 6
    for why in found.not_recomputed.values():
        assert re.fullmatch(r"(the state of commit \d+|payloads/.*) is gone", why)
    assert len(gone) > 50


@pytest.mark.parametrize("when", ["reading the records", "reading the headers", "recomputing fragment 2 of 3"])
def test_a_run_may_go_on_meanwhile(tmp_path, when):
    run = Run(Store(tmp_path), random.Random(2)).grow(12)

    def say(what):
        if what == when:
            run.grow(25)
            for file in tmp_path.rglob("*"):
                os.utime(file, (1, 1))
            assert clean(run.store, kept(run.records))

    assert verify(run.store, say).problems == []


@pytest.mark.parametrize("how", ["flip", "tear", "empty", "delete"])
def test_every_file_that_is_harmed_is_named(run, how):
    """One file at a time, of every kind. Without a bookmark the run is what it was."""
    Ledger(run.store).bookmark(run.view)
    kinds: dict[str, list[Path]] = {}
    root = Path(run.store.root)
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        kinds.setdefault(path.relative_to(root).parts[0], []).append(path)
    assert sorted(kinds) == ["commits", "headers", "objects", "payloads", "views"]
    kept = [each.identity for record in run.records for each in applied(run, record.version)]
    kept.append(run.headers[-1].identity)
    needed = {payload_name(identity, fragment) for identity in kept for fragment in range(len(SIZES))}
    # Without one of these the storage is that of a run that never came to it.
    unknown = {commit_name(12), header_name(run.headers[-1].identity), bookmark_name(12)}
    for kind, paths in kinds.items():
        for path in random.Random(1).sample(paths, min(6, len(paths))):
            name, whole = path.relative_to(root).as_posix(), path.read_bytes()
            if how == "flip":
                flip(path)
            elif how == "tear":
                path.write_bytes(whole[:-1])
            elif how == "empty":
                path.write_bytes(b"")
            else:
                path.unlink()
            found = report(run)
            expected = how != "delete" or (name in needed if kind == "payloads" else name not in unknown)
            assert any(name in problem for problem in found.problems) == expected, (name, found.problems)
            path.write_bytes(whole)
    assert report(run).problems == []


def test_the_newest_whole_version(run):
    last = with_contributors(run)[-1]
    before = next(record.version for record in reversed(run.records) if record.state != run.records[last].state)
    flip(run.store.path(object_name(run.records[last].state[2])))
    assert newest_whole(run.store) == before
    shutil.rmtree(Path(run.store.root) / "objects")
    with pytest.raises(RunFailed, match=r"no commit in .* is intact; restore a copy of commits/ and objects/"):
        newest_whole(run.store)
    shutil.rmtree(Path(run.store.root) / "commits")
    with pytest.raises(RunFailed, match=r"no commit in .* is intact"):
        newest_whole(run.store)


def test_records_after_a_bad_one_are_not_proved(run):
    flip(run.store.path(commit_name(7)))
    found = report(run)
    assert found.newest == 6 and "6 records from commits/000007.json on are unproven" in found.problems
    assert newest_whole(run.store) == 6
    run.store.delete(commit_name(3))
    found = report(run)
    assert found.newest == 2 and any("commits/000003.json is missing" in problem for problem in found.problems)


def test_no_ledger(tmp_path):
    found = verify(Store(tmp_path), lambda _: None)
    assert found.newest is None and "commits/000000.json is missing" in found.problems[0]


def rewritten(run: Run, version: int, change) -> Run:
    """The run with one record changed and the chain after it made anew: each file is right, the content is not."""
    records = [*run.records[:version], change(run.records[version]), *run.records[version + 1 :]]
    for number in range(version, len(records)):
        records[number] = replace(records[number], parent=run.ledger.digest(records[number - 1]))
        run.store.delete(commit_name(number))
        assert Ledger(run.store).append(records[number]) == "created"
    run.records = records
    return run


def first_applied(run: Run, change):
    """A record with its first applied decision changed."""

    def changed(record):
        decision = next(each for each in record.decisions if each.fate == "applied")
        return replace(record, decisions=tuple(change(each) if each is decision else each for each in record.decisions))

    return rewritten(run, with_contributors(run)[1], changed)


def test_a_wrong_weight_is_found_by_its_sum_and_by_computing_again(run):
    found = report(first_applied(run, lambda decision: replace(decision, weight=decision.weight * 0.99)))
    version = with_contributors(run)[1]
    assert any(f"{commit_name(version)}: its weights add up to 0.9" in problem for problem in found.problems)
    assert any(f"{commit_name(version)}, fragment 0: recomputed, it is a different state" in p for p in found.problems)
    assert version not in found.recomputed and version in found.not_recomputed


def test_a_wrong_state_is_found_by_computing_again(run):
    last = with_contributors(run)[-1]
    other = run.state(run.records[last].version)
    other[0] = np.nextafter(other[0], np.float32(9))
    digest = Objects(run.store).put_array(other[0])

    def change(record):
        return replace(record, state=(digest, *record.state[1:]))

    for version in range(last, len(run.records)):  # records without contributors repeat it
        rewritten(run, version, change)
    found = report(run)
    assert found.problems == [f"{commit_name(last)}, fragment 0: recomputed, it is a different state"]
    assert found.recomputed == with_contributors(run)[:-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: replace(it, base=it.base + 90), "disagree: rows, tokens or base differ"),
        (
            lambda it: replace(it, identity=replace(it.identity, sequence=77)),
            r"77.json is missing, but .* lists it as applied",
        ),
    ],
)
def test_a_verdict_that_is_not_its_headers_is_found(run, change, words):
    version = with_contributors(run)[1]
    found = report(first_applied(run, change))
    assert any(commit_name(version) in problem and re.search(words, problem) for problem in found.problems)
    assert version in found.not_recomputed


def test_a_payload_of_other_size_is_a_problem_and_no_crash(run):
    identity = applied(run, with_contributors(run)[-1])[0].identity
    header = next(header for header in run.headers if header.identity == identity)
    for name in (payload_name(identity, 0), header_name(identity)):
        run.store.delete(name)
    digest = Objects(run.store).put_payload(identity, 0, {"s": np.zeros(7, np.float32)})
    Ledger(run.store).create_header(replace(header, digests=(digest, *header.digests[1:])))
    found = report(run)
    assert any("does not have the 300 elements of its base" in problem for problem in found.problems)
