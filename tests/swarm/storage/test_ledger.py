"""Records and headers as files: exact, canonical, created once; the view against a naive recount."""

import hashlib
import json
import random
import threading
import uuid
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.chains import PER_ROW, Run
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Averaged, Header, Identity, Incarnation, Record
from tpuswarm.swarm.storage.ledger import Ledger, commit_name, digest, header_name
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

ME = Identity(Incarnation("m-1", "ab" * 16), 3)
FATES = ("applied", "returned", "dropped", "void")
HEADER = Header(ME, "run", 0, Rows(((0, 4), (8, 10))), 48, 3, "int8", 0.1, True, ("a" * 64, "b" * 64))


@pytest.fixture
def run(tmp_path):
    return Run(Store(tmp_path / "run"), random.Random(0), arrays=False).grow(6)


def test_what_comes_back_is_what_was_written(store):
    made = Run(store, random.Random(1), arrays=False).grow(4)
    ledger = Ledger(store)
    assert list(ledger.records(ledger.versions())) == made.records
    assert ledger.view() == made.view
    assert sorted(ledger.headers(), key=lambda each: each.identity) == sorted(made.headers, key=lambda e: e.identity)
    assert ledger.headers(made.view) == []


def test_creations_say_what_they_found(store):
    made = Run(store, random.Random(2), arrays=False).grow(1)
    other = Ledger(store)
    assert other.append(made.records[1]) == "same"
    assert other.append(replace(made.records[1], time=9.0)) == "lost"
    assert other.append(made.records[0]) == "same"
    assert [other.create_header(each) for each in (HEADER, HEADER, replace(HEADER, tokens=7))] == [
        "created",
        "same",
        "lost",
    ]
    assert other.view() == made.view


def test_json_is_canonical_and_digests_are_of_it(run, tmp_path):
    for record, after in zip(run.records, [*run.records[1:], None], strict=True):
        text = (tmp_path / "run" / commit_name(record.version)).read_text()
        value = json.loads(text)
        assert text == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
        assert value["sha256"] == digest(record) == run.ledger.digest(record)
        assert after is None or after.parent == value["sha256"]
    assert {path.name for path in (tmp_path / "run" / "commits").iterdir()} == {f"{n:06d}.json" for n in range(7)}
    assert (tmp_path / "run" / header_name(run.headers[0].identity)).exists()


def test_what_is_averaged_stands_in_a_record_only_where_there_is_some(run, tmp_path):
    """So records from before are what they were, to the byte."""
    assert b"averaged" not in (tmp_path / "run" / commit_name(1)).read_bytes()
    record = replace(run.records[0], averaged=(Averaged(0, 3, 7), Averaged(2, 0, 1)))
    other = Ledger(Store(tmp_path / "other"))
    other.append(record)
    assert other.record(0) == record and b'"averaged":[[0,3,7],[2,0,1]]' in other.store.read(commit_name(0))
    assert digest(record) != digest(run.records[0])


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5), st.integers(0, 2**60))
def test_floats_text_and_numbers_come_back_exactly(number, text, tokens):
    ledger = Ledger(Store(f"memory://{uuid.uuid4()}"))
    header = replace(HEADER, norm=number, run=text, tokens=tokens)
    try:
        text.encode()
    except UnicodeEncodeError:
        with pytest.raises(ValueError):
            ledger.create_header(header)
        return
    assert ledger.create_header(header) == "created"
    (back,) = ledger.headers()
    assert back == header and back.norm.hex() == number.hex()


def test_a_whole_number_may_stand_for_a_float(tmp_path):
    ledger = Ledger(Store(tmp_path))
    assert ledger.create_header(replace(HEADER, norm=1)) == "created"
    assert ledger.create_header(replace(HEADER, norm=1.0)) == "same"
    assert isinstance(ledger.headers()[0].norm, float)


@pytest.mark.parametrize(
    "change", [{"norm": float("nan")}, {"norm": float("inf")}, {"form": "int7"}, {"rows": "x"}, {"tokens": 1.5}]
)
def test_what_would_not_come_back_is_not_written(tmp_path, change):
    with pytest.raises(ValueError):
        Ledger(Store(tmp_path)).create_header(replace(HEADER, **change))
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_no_files_names_are_refused_before_anything_is_written(tmp_path):
    header = replace(HEADER, identity=Identity(Incarnation("../m", "ab"), 1))
    with pytest.raises(InputError, match="cannot be the name of a member"):
        Ledger(Store(tmp_path)).create_header(header)
    assert list(tmp_path.iterdir()) == []


def damaged(run: Run, name: str, data: bytes) -> Ledger:
    """The ledger of a run, one file of which holds something else."""
    path = run.store.path(name)
    path.write_bytes(data)
    return Ledger(run.store)


def sealed(value: dict) -> bytes:
    """A file with the right digest, whatever its content."""
    body = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return b'{"record":' + body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def content(run: Run, name: str) -> dict:
    return json.loads(run.store.read(name))["record"]


def test_a_flipped_bit_is_found_wherever_it_is(run):
    """In the newest record and in headers too, which no later record covers."""
    for name in (commit_name(6), commit_name(2), commit_name(0), header_name(run.headers[-1].identity)):
        whole = run.store.read(name)
        for bit in random.Random(0).sample(range(len(whole) * 8), 200):
            torn = bytearray(whole)
            torn[bit // 8] ^= 1 << bit % 8
            ledger = damaged(run, name, torn)
            with pytest.raises(Corrupt, match=f"^{name} in .*run is damaged: it does not match the digest"):
                ledger.view() if name.startswith("commits") else ledger.headers()
        run.store.path(name).write_bytes(whole)
    assert run.ledger.view() == run.view


@pytest.mark.parametrize("data", [b"", b"{", b'{"record":', b'{"record":{},"sha256":""}\n', b"[]", b"\xff" * 200])
def test_torn_and_foreign_files_are_named(run, data):
    with pytest.raises(Corrupt, match=r"^commits/000003\.json in .* is damaged: it does not match the digest"):
        damaged(run, commit_name(3), data).view()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: it.pop("rate"), "rate: Field required"),
        (lambda it: it.update(extra=1), "extra: Unexpected keyword argument"),
        (lambda it: it.update(version="3"), "version: Input should be a valid integer"),
        (lambda it: it.update(version=4), "it holds record 4"),
        (lambda it: it.update(rate=None), "rate: Input should be a valid number"),
        (lambda it: it.update(rule="mean"), "rule: Input should be 'average' or 'nesterov'"),
        (lambda it: it.update(state="x"), "state: Input should be a valid array"),
        (lambda it: it["decisions"][0].pop("clip"), "a field is missing"),
        (lambda it: it["decisions"][0]["rows"].update(ranges=[[3, 1]]), r"decisions.0.rows: .*not sorted"),
        (lambda it: it.update(time=1), "a field is missing, or it is not canonical JSON"),
        (lambda it: it.update(tokens=it["tokens"] + 1), "record 3 says .* tokens"),
        (lambda it: it.update(parent="0" * 64), "its parent is not record 2"),
        (lambda it: it.update(run="other"), "record 3 of run other does not follow"),
        (lambda it: it.update(epoch=0), "record 3 has epoch 0"),
        (lambda it: it.update(state=["x"]), "it has 1 fragments, not 3"),
    ],
)
def test_a_record_that_is_none_or_does_not_follow_is_named(run, change, words):
    value = content(run, commit_name(3))
    change(value)
    with pytest.raises(Corrupt, match=rf"^commits/000003\.json in .* is damaged: {words}"):
        damaged(run, commit_name(3), sealed(value)).view()


def test_a_record_that_was_replaced_by_a_sound_one_is_found(run):
    """By the parent that the next one names."""
    value = content(run, commit_name(3))
    value["time"] += 1.0
    with pytest.raises(Corrupt, match=r"^commits/000004\.json .*its parent is not record 3"):
        damaged(run, commit_name(3), sealed(value)).view()


def test_a_first_record_that_is_no_genesis_is_named(run):
    value = content(run, commit_name(0))
    value["tokens"] = 5
    with pytest.raises(Corrupt, match=r"^commits/000000\.json .*the first record is not a genesis record"):
        damaged(run, commit_name(0), sealed(value)).view()


def test_a_header_under_another_name_is_found(run):
    one, two = (header_name(each.identity) for each in run.headers[:2])
    with pytest.raises(Corrupt, match=f"^{one} in .*it holds the header of Identity"):
        damaged(run, one, run.store.read(two)).headers()


def test_missing_records_are_named(run, tmp_path):
    with pytest.raises(RunFailed, match="has no commits; use the folder or URL of a swarm's run"):
        Ledger(Store(tmp_path / "empty")).view()
    run.store.delete(commit_name(4))
    with pytest.raises(Missing, match=r"^commits/000004\.json is missing"):
        run.ledger.view()


def test_refreshing_reads_new_records_only(run):
    ledger, before = Ledger(run.store), run.view
    assert ledger.refresh(before) == before
    run.grow(3)
    for version in range(before.version):
        run.store.delete(commit_name(version))
    assert ledger.refresh(before) == run.view


def test_other_files_beside_the_records_do_no_harm(run, tmp_path):
    (tmp_path / "run" / "commits" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "commits" / ".000007.json.ab.part").write_text("torn")
    assert run.ledger.view() == run.view


def counted_naively(records: list[Record]) -> dict:
    """The books, from Python sets of rows."""
    books: dict = {"counted": set(), "skipped": set(), "members": {}, "tokens": dict.fromkeys(FATES, 0), "changes": 0}
    for record in records:
        applied = [each for each in record.decisions if each.fate == "applied"]
        books["changes"] += bool(applied)
        for each in record.decisions:
            rows = {row for start, stop in each.rows.ranges for row in range(start, stop)}
            if each.fate == "applied":
                assert not rows & (books["counted"] | books["skipped"])
                books["counted"] |= rows
            elif each.fate == "dropped":
                books["skipped"] |= rows
            books["tokens"][each.fate] += len(rows) * PER_ROW
            member = books["members"].setdefault(each.identity.incarnation.member, dict.fromkeys(("n", *FATES), 0))
            member["n"] += 1
            member[each.fate] += len(rows) * PER_ROW
    return books


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(0, 10))
def test_the_view_agrees_with_a_naive_recount(source, commits):
    made = Run(Store(f"memory://{uuid.uuid4()}"), source, arrays=False).grow(commits)
    ledger = Ledger(made.store)
    view, books = ledger.view(), counted_naively(made.records)
    assert view == made.view
    for name in ("counted", "skipped"):
        assert {row for start, stop in getattr(view, name).ranges for row in range(start, stop)} == books[name]
    assert view.tokens == books["tokens"]["applied"] and view.dropped == books["tokens"]["dropped"]
    assert view.newest.changes == books["changes"] and view.version == commits


def test_two_coordinators_race_for_every_record_and_one_wins(tmp_path):
    """Each round both make the next record from the view they have; the loser reads what won."""
    made = Run(Store(tmp_path), random.Random(0), arrays=False)
    rounds, outcomes = 40, []

    def coordinate(epoch: int) -> None:
        ledger = Ledger(Store(tmp_path))
        view, own = ledger.view(), []
        for _ in range(rounds):
            barrier.wait()
            newest = view.newest
            record = replace(newest, version=view.version + 1, epoch=1, parent=digest(newest), time=float(epoch))
            own.append(ledger.append(record))
            view = ledger.refresh(view)
        outcomes.append(own)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=coordinate, args=(epoch,)) for epoch in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(each) for each in zip(*outcomes, strict=True)] == [["created", "lost"]] * rounds
    assert made.ledger.view().version == rounds
