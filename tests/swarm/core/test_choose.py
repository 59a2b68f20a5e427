"""Which contributions count, and how much; sets of rows against Python's own sets."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.swarm.exact import TERMS, genesis
from tpuswarm.swarm.core.choose import Staleness, choose, clipping, effective
from tpuswarm.swarm.core.ledger_view import InvalidRecord, LedgerView
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Header, Identity, Incarnation


def header(member: str, rows: tuple[int, int], base: int = 3, norm: float = 1.0, finite: bool = True) -> Header:
    identity = Identity(Incarnation(member, "0"), rows[0] + 1)
    tokens = rows[1] - rows[0]
    return Header(identity, "run", base, Rows.from_ranges(rows), tokens, tokens, "plain", norm, finite, ("d",))


def after(view: LedgerView, decisions: list[Decision]) -> LedgerView:
    tokens = [decision.tokens for decision in decisions if decision.fate == "applied"]
    version, state = view.version + 1, (f"state {view.version + 1}",) if tokens else view.newest.state
    changes = {"tokens": view.tokens + sum(tokens), "changes": view.newest.changes + bool(tokens)}
    return view.after(genesis(TERMS, version=version, state=state, decisions=tuple(decisions), **changes))


@pytest.fixture
def view() -> LedgerView:
    """Version 3: rows 0, 1 and 2 are counted."""
    made = LedgerView.from_records(genesis(TERMS))
    for row in range(3):
        made = after(made, choose(made, [header("z", (row, row + 1), base=row)], (), Staleness()))
    return made


def test_weights_are_tokens_times_freshness(view):
    decisions = choose(view, [header("a", (10, 14)), header("b", (14, 16), base=1)], (), Staleness(4, 0.5))
    assert [(decision.fate, decision.weight) for decision in decisions] == [("applied", 0.8), ("applied", 0.2)]


def test_every_reason_not_to_count(view):
    lost = header("c", (30, 32))
    given = [header("a", (10, 12), finite=False, norm=0.0), header("b", (20, 22), base=0), lost]
    given += [header("d", (2, 4)), header("e", (40, 41))]
    decisions = choose(view, given, {lost.identity}, Staleness(limit=2))
    assert [decision.fate for decision in decisions] == ["dropped", "dropped", "returned", "void", "applied"]
    assert [decision.weight for decision in decisions] == [0, 0, 0, 0, 1]
    assert "3 commits stale" in decisions[1].reason and "2 to 3" in decisions[3].reason
    assert after(view, decisions).skipped == Rows.from_ranges((10, 12), (20, 22))


def test_of_two_contributions_with_the_same_rows_the_first_counts(view):
    decisions = choose(view, [header("b", (10, 12)), header("a", (11, 13))], (), Staleness())
    fates = [(decision.identity.incarnation.member, decision.fate) for decision in decisions]
    assert fates == [("a", "applied"), ("b", "void")]


def test_version_without_contributors_makes_nothing_stale(view):
    with pytest.raises(InvalidRecord, match="there is no version 4: the newest is 3"):  # such as after a restored copy
        view.staleness(4)
    view = after(view, choose(view, [header("a", (10, 11), finite=False)], (), Staleness()))
    assert view.version == 4 and view.staleness(3) == 0


def test_large_contribution_is_clipped():
    assert clipping([1.0, 100.0]) == [1.0, 1.0]
    assert clipping([1.0, 2.0, 12.0]) == [1.0, 1.0, 0.5]


def test_large_contribution_of_a_person_is_clipped_without_a_majority():
    assert clipping([1.0, 12.0], [False, True]) == [1.0, 0.25]
    assert clipping([12.0, 1.0], [False, True]) == [1.0, 1.0], "the swarm's own are trusted"
    assert clipping([12.0, 1.0], [True, True]) == [0.25, 1.0]
    assert clipping([12.0], [True], [1.0, 1.0, 9.0]) == [0.25]
    assert clipping([12.0], [True]) == [1.0], "nothing is known"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_unequal_weights_count_as_fewer_contributors(tokens):
    exact = Fraction(sum(tokens)) ** 2 / sum(Fraction(count) ** 2 for count in tokens)
    assert effective([count / sum(tokens) for count in tokens]) == pytest.approx(float(exact))


def test_records_that_do_not_follow_are_refused(view):
    good = after(view, choose(view, [header("a", (10, 12))], (), Staleness())).newest
    twice = choose(LedgerView.from_records(genesis(TERMS)), [header("b", (0, 1), base=0)], (), Staleness())
    [late] = view.newest.decisions
    late = replace(late, fate="returned", weight=0.0, identity=replace(late.identity, sequence=2))
    for change, words in [
        ({"version": 9}, "does not follow"),
        ({"decisions": tuple(twice)}, "twice"),
        ({"decisions": (), "tokens": 3, "changes": 3}, "no contributors but a new state"),
        ({"decisions": (late,), "tokens": 3, "changes": 3}, "decides push 2 of .*, of which push 3 was already"),
    ]:
        with pytest.raises(InvalidRecord, match=words):
            view.after(replace(good, **change))


numbers = st.sets(st.integers(0, 30)) | st.sets(st.integers(0, 99), min_size=40)  # few ranges and many


def rows(these: set[int]) -> Rows:
    return Rows.from_ranges(*((n, n + 1) for n in these))


def members(of: Rows) -> set[int]:
    assert Rows(of.ranges) == of  # raises unless they are sorted and separate
    return {n for start, stop in of.ranges for n in range(start, stop)}


@given(numbers, numbers, st.integers(0, 40))
def test_sets_of_rows_behave_as_sets(a: set[int], b: set[int], count: int):
    assert members(rows(a)) == a and len(rows(a)) == len(a) and bool(rows(a)) == bool(a)
    assert rows(a) | rows(b) == rows(a | b) == Rows.union([rows(a), rows(b)])
    assert rows(a) - rows(b) == rows(a - b)
    assert rows(a) & rows(b) == rows(a & b)
    assert members(rows(a).first(count)) == set(sorted(a)[:count])
    assert members(rows(a).free(count)) == set([n for n in range(200) if n not in a][:count])


@pytest.mark.parametrize("ranges", [((3, 3),), ((5, 2),), ((0, 2), (2, 4)), ((4, 6), (0, 1)), ((-1, 2),)])
def test_other_ranges_are_refused(ranges):
    with pytest.raises(ValueError, match="not sorted, separate ranges"):
        Rows(ranges)
