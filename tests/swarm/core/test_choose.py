"""Which contributions count, and how much."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.swarm.exact import DIGESTS, genesis
from tpuswarm.swarm.core.arithmetic.outer import Outer
from tpuswarm.swarm.core.choose import Staleness, choose, clipping, effective
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Header, Identity, Incarnation, Record
from tpuswarm.swarm.core.view import Broken, View

TERMS = Terms(
    run="run", digests=DIGESTS, batch=1, tokens_per_row=1, horizon=100, cycle=2, members=(), outer=Outer("average")
)


def header(member: str, rows: tuple[int, int], base: int = 0, norm: float = 1.0, finite: bool = True) -> Header:
    identity = Identity(Incarnation(member, "0"), rows[0] + 1)
    tokens = rows[1] - rows[0]
    return Header(identity, "run", base, Rows.of(rows), tokens, tokens, "plain", norm, finite, ("d",))


def after(view: View, decisions: list[Decision]) -> View:
    applied = [each for each in decisions if each.fate == "applied"]
    tokens = view.tokens + sum(each.tokens for each in applied)
    state = (f"state {view.version + 1}",) if applied else view.newest.state
    return view.after(
        Record(
            "run", view.version + 1, 1, "", state, (), tuple(decisions), "average", 1.0, 0.0, 1.0, 0.0, tokens,
            view.newest.changes + bool(applied), (), DIGESTS, 0.0,
        )
    )  # fmt: skip


@pytest.fixture
def view() -> View:
    """Three versions, which counted rows 0, 1 and 2."""
    made = View.of(genesis(TERMS))
    for row in range(3):
        made = after(made, choose(made, [header("z", (row, row + 1), base=row)], (), Staleness()))
    return made


def test_weights_are_tokens_times_freshness(view):
    given = [header("a", (10, 14), base=3), header("b", (14, 16), base=1)]
    found = choose(view, given, (), Staleness(limit=4, discount=0.5))
    assert [(each.fate, each.weight) for each in found] == [("applied", 0.8), ("applied", 0.2)]


def test_every_reason_not_to_count(view):
    lost = header("c", (30, 32), base=3)
    given = [
        header("a", (10, 12), base=3, finite=False, norm=0.0),
        header("b", (20, 22), base=0),
        lost,
        header("d", (2, 4), base=3),
        header("e", (40, 41), base=3),
    ]
    found = choose(view, given, {lost.identity}, Staleness(limit=2))
    assert [each.fate for each in found] == ["dropped", "dropped", "returned", "void", "applied"]
    assert [each.weight for each in found] == [0, 0, 0, 0, 1]
    assert "3 commits stale" in found[1].reason and "2 to 3" in found[3].reason
    assert after(view, found).skipped == Rows.of((10, 12), (20, 22))


def test_of_two_with_the_same_rows_the_first_counts(view):
    found = choose(view, [header("b", (10, 12), base=3), header("a", (11, 13), base=3)], (), Staleness())
    assert [(each.identity.incarnation.member, each.fate) for each in found] == [("a", "applied"), ("b", "void")]


def test_versions_without_contributors_make_nothing_stale(view):
    dropped = choose(view, [header("a", (10, 11), base=3, finite=False)], (), Staleness())
    view = after(view, dropped)
    assert view.version == 4 and view.staleness(3) == 0


def test_clipping():
    assert clipping([1.0, 100.0]) == [1.0, 1.0]
    assert clipping([1.0, 2.0, 12.0]) == [1.0, 1.0, 0.5]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_effective_contributors(tokens):
    exact = Fraction(sum(tokens)) ** 2 / sum(Fraction(each) ** 2 for each in tokens)
    assert effective([each / sum(tokens) for each in tokens]) == pytest.approx(float(exact))
    assert effective([0.25] * 4) == 4


def test_records_that_do_not_follow(view):
    record = after(view, []).newest
    decision = choose(view, [header("a", (10, 12), base=3)], (), Staleness())
    good = after(view, decision).newest
    twice = choose(View.of(genesis(TERMS)), [header("b", (0, 1))], (), Staleness())
    for change, words in [
        ({"version": 9}, "does not follow"),
        ({"epoch": 0}, "epoch 0"),
        ({"tokens": 3}, "says 3 tokens"),
        ({"decisions": tuple(twice)}, "twice"),
        ({"decisions": (), "tokens": 3, "changes": 3}, "no contributors but a new state"),
    ]:
        with pytest.raises(Broken, match=words):
            view.after(Record(**{**vars(good), **change}))
    assert view.after(record).version == 4
