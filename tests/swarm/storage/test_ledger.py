"""Records and headers as files: exact, canonical, created once. Damage is found, and the view counts correctly."""

import json
import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.chains import Run, counted_naively, edit_file, flip_bit, memory_store
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import AveragedSlice, Header, Identity, Incarnation
from tpuswarm.swarm.storage.ledger import Ledger, commit_name, header_name, record_digest
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

HEADER = Header(
    Identity(Incarnation("m-1", "ab" * 16), 3), "run", 0, Rows(((0, 4), (8, 10))), 48, 3, "int8", 0.1, True,
    ("a" * 64, "b" * 64),
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    return Run(Store(tmp_path / "run"), random.Random(0), arrays=False).grow(6)


def test_records_and_headers_come_back_as_written(store):
    run = Run(store, random.Random(1), arrays=False).grow(4)
    ledger = Ledger(store)
    assert list(ledger.records(ledger.versions())) == run.records
    assert ledger.view() == run.view
    assert sorted(ledger.headers(), key=lambda it: it.identity) == sorted(run.headers, key=lambda it: it.identity)
    assert ledger.headers(run.view) == []


def test_creation_reports_what_it_found(store):
    run = Run(store, random.Random(2), arrays=False).grow(1)
    ledger = Ledger(store)
    records = [run.records[1], replace(run.records[1], time=9.0), run.records[0]]
    assert [ledger.append(record) for record in records] == ["same", "lost", "same"]
    headers = [HEADER, HEADER, replace(HEADER, tokens=7)]
    assert [ledger.create_header(header) for header in headers] == ["created", "same", "lost"]
    assert ledger.view() == run.view


def test_files_are_canonical_json_with_their_digest(run, tmp_path):
    for record, after in zip(run.records, [*run.records[1:], None], strict=True):
        text = (tmp_path / "run" / commit_name(record.version)).read_text()
        value = json.loads(text)
        assert text == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
        assert value["sha256"] == record_digest(record) == run.ledger.digest(record)
        assert after is None or after.parent == value["sha256"]
    assert {path.name for path in (tmp_path / "run" / "commits").iterdir()} == {f"{n:06d}.json" for n in range(7)}
    assert (tmp_path / "run" / header_name(run.headers[0].identity)).exists()


def test_records_without_averaged_ranges_do_not_mention_them(run, tmp_path):
    """So older records keep their bytes and digests."""
    assert b"averaged" not in (tmp_path / "run" / commit_name(1)).read_bytes()
    record = replace(run.records[0], averaged=(AveragedSlice(0, 3, 7), AveragedSlice(2, 0, 1)))
    other = Ledger(Store(tmp_path / "other"))
    other.append(record)
    assert other.record(0) == record and b'"averaged":[[0,3,7],[2,0,1]]' in other.store.read(commit_name(0))
    assert record_digest(record) != record_digest(run.records[0])


@settings(max_examples=25)
@given(st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5), st.integers(0, 2**60))
def test_floats_text_and_numbers_come_back_exactly(number, text, tokens):
    ledger = Ledger(memory_store())
    header = replace(HEADER, norm=number, run=text, tokens=tokens)
    try:
        text.encode()
    except UnicodeEncodeError:
        with pytest.raises(ValueError):
            ledger.create_header(header)
        return
    assert ledger.create_header(header) == "created"
    back = ledger.header(header_name(header.identity))
    assert back == header and back.norm.hex() == number.hex()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"norm": float("nan")}, ValueError, None),
        ({"form": "int7"}, ValueError, None),
        ({"tokens": 1.5}, ValueError, None),
        ({"identity": Identity(Incarnation("../m", "ab"), 1)}, InputError, "cannot be the name of a member"),
    ],
)
def test_header_that_would_not_come_back_is_not_written(tmp_path, change, error, words):
    with pytest.raises(error, match=words):
        Ledger(Store(tmp_path)).create_header(replace(HEADER, **change))
    assert list(tmp_path.iterdir()) == []


def test_any_flipped_bit_and_torn_or_foreign_file_is_found(run):
    """In the newest record and in headers too, which no later record covers."""
    foreign = [b"", b"{", b'{"record":', b'{"record":{},"sha256":""}\n', b"[]", b"\xff" * 200]
    for name in (commit_name(6), commit_name(0), header_name(run.headers[-1].identity)):
        path, whole = run.store.path(name), run.store.read(name)
        damages = [partial(flip_bit, path, bit) for bit in random.Random(0).sample(range(len(whole) * 8), 60)]
        for damage in [*damages, *(partial(path.write_bytes, data) for data in foreign)]:
            damage()
            with pytest.raises(Corrupt, match=f"^{name} in .*run is damaged: it does not match the digest"):
                run.ledger.record(int(path.stem)) if name.startswith("commits") else run.ledger.header(name)
            path.write_bytes(whole)
    assert run.ledger.view() == run.view


@pytest.mark.parametrize(
    ("changed", "edit", "named", "words"),
    [
        (3, lambda it: it.pop("rate"), 3, "rate: Field required"),
        (3, lambda it: it.update(version=4), 3, "it holds record 4"),
        (3, lambda it: it["decisions"][0].pop("clip"), 3, "a field is missing"),
        (3, lambda it: it["decisions"][0]["rows"].update(ranges=[[3, 1]]), 3, r"decisions.0.rows: .*not sorted"),
        (3, lambda it: it.update(time=1), 3, "a field is missing, or it is not canonical JSON"),
        (3, lambda it: it.update(tokens=it["tokens"] + 1), 3, "record 3 has .* tokens"),
        (3, lambda it: it.update(parent="0" * 64), 3, "its parent is not record 2"),
        (3, lambda it: it.update(run="other"), 3, "record 3 of run other does not follow"),
        (3, lambda it: it.update(epoch=0), 3, "record 3 has epoch 0"),
        (3, lambda it: it.update(state=["x"]), 3, "it has 1 fragments, not 3"),
        (3, lambda it: it.update(time=it["time"] + 1), 4, "its parent is not record 3"),
        (0, lambda it: it.update(tokens=5), 0, "the first record is not a genesis record"),
    ],
)
def test_sealed_record_that_is_invalid_or_does_not_follow_is_named(run, changed, edit, named, words):
    edit_file(run.store, commit_name(changed), edit)
    with pytest.raises(Corrupt, match=rf"^{commit_name(named)} in .* is damaged: {words}"):
        run.ledger.view()


def test_header_under_another_name_is_found(run):
    one, two = (header_name(header.identity) for header in run.headers[:2])
    run.store.path(one).write_bytes(run.store.read(two))
    with pytest.raises(Corrupt, match=f"^{one} in .*it holds the header of Identity"):
        run.ledger.headers()


def test_missing_records_are_named(run, tmp_path):
    with pytest.raises(RunFailed, match="has no commits; use the folder or URL of a swarm's run"):
        Ledger(Store(tmp_path / "empty")).view()
    run.store.delete(commit_name(4))
    with pytest.raises(Missing, match=r"^commits/000004\.json is missing"):
        run.ledger.view()


def test_refresh_reads_new_records_only_and_ignores_other_files(run, tmp_path):
    (tmp_path / "run" / "commits" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "commits" / ".000007.json.ab.part").write_text("torn")
    ledger, before = Ledger(run.store), run.view
    assert ledger.refresh(before) == before
    run.grow(3)
    for version in range(before.version):
        run.store.delete(commit_name(version))
    assert ledger.refresh(before) == run.view


@settings(max_examples=40)
@given(st.integers(0, 10**9), st.integers(0, 10))
def test_view_agrees_with_a_naive_count(seed, commits):
    run = Run(memory_store(), random.Random(seed), arrays=False).grow(commits)
    view, books = run.ledger.view(), counted_naively(run.records)
    assert view == run.view
    for name in ("counted", "skipped"):
        assert {row for start, stop in getattr(view, name).ranges for row in range(start, stop)} == books[name]
    assert view.tokens == books["tokens"]["applied"] and view.dropped == books["tokens"]["dropped"]
    assert view.newest.changes == books["changes"] and view.version == commits
