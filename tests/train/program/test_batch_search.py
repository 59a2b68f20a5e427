"""`--batch auto`: as many rows as the devices hold."""

import re

import jax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.train import toy
from tpuswarm import InputError, Trainer
from tpuswarm.train.loop import session
from tpuswarm.train.program.batch_search import MAX_ROWS, BatchSearch, find_largest, largest_batch, next_size
from tpuswarm.train.program.compiled import Compiled, compile_step, compile_traced, trace
from tpuswarm.train.program.request import default_batch, default_request
from tpuswarm.train.run.directory import read_config

MEMORY = 1_000_000


def search(memory_of, start=1):
    """Return the answer, and the compiled sizes that fit and that did not."""
    fits, refused = [], []

    def used(size):
        found = memory_of(size)
        (fits if found <= MEMORY else refused).append(size)
        return found if found <= MEMORY else None

    return find_largest(used, start, memory_of(start), MEMORY), fits, refused


@given(slope=st.integers(2, 200_000), fixed=st.integers(0, 700_000), start=st.integers(1, 40))
def test_largest_size_is_found_and_the_next_one_does_not_fit(slope, fixed, start):
    def memory_of(size):
        return fixed + slope * size

    assume(memory_of(start) <= MEMORY)
    (found, refused), _, refusals = search(memory_of, start)
    size = start
    while memory_of(next_size(size)) <= MEMORY:
        size = next_size(size)
    assert found == size
    assert refused == next_size(found) and refused in refusals


def test_linear_memory_takes_three_compilations():
    (found, refused), fits, refusals = search(lambda size: 200_000 + 7_000 * size, start=8)
    assert (found, refused) == (112, 120)
    assert fits == [16, 112] and refusals == [120]
    assert [next_size(size) for size in (1, 7, 8, 15, 16, 100, 128)] == [2, 8, 9, 16, 18, 104, 144], "round numbers"
    (found, refused), _, _ = search(lambda size: 10)
    assert found == MAX_ROWS and refused is None, "without a limit"


def test_search_ends_at_its_limit():
    measured = []
    assert find_largest(lambda size: measured.append(size) or 10, 1, 10, MEMORY, limit=64) == (64, None)
    assert measured == [2, 64]


@given(st.integers(1, 300), st.integers(1, 64), st.data())
def test_search_with_a_limit_finds_the_largest_size_to_be_tried(start, growth, data):
    """The limit need not be a round number."""
    limit = start * growth
    fitting = data.draw(st.integers(start, limit + 10))

    def used(size):
        assert size <= limit
        return size if size <= fitting else None

    found, refused = find_largest(used, start, start, fitting, limit=limit)
    size = start
    while min(next_size(size), limit) <= fitting and size < limit:
        size = min(next_size(size), limit)
    assert found == size and (refused is None or refused > fitting)


@pytest.mark.parametrize(
    "memory_of",
    [
        lambda size: 100_000 + 9_000 * size - 15_000 * (size % 3),  # a compiler whose memory is not linear
        lambda size: 700_000 if size < 16 else 300_000 + 20_000 * size,  # small sizes that predict nothing
        lambda size: 100 * size * size,
    ],
)
def test_largest_size_is_found_when_memory_is_not_linear(memory_of):
    (found, refused), fits, _ = search(memory_of, start=4)
    assert memory_of(found) <= MEMORY < memory_of(refused) and refused == next_size(found)
    assert len(fits) <= 6


def batch_search(memory, log=lambda text: None, **request):
    return BatchSearch(toy.Layers(), default_request(toy.Layers(), **request), jax.devices()[:2], memory, log)


@pytest.fixture(scope="module")
def needed():
    """Bytes of a device by rows of a device, without recomputation."""
    requests = {rows: default_request(toy.Layers(), batch=2 * rows) for rows in (60, 110)}
    return {rows: compile_step(toy.Layers(), asked, jax.devices()[:2]).memory.total for rows, asked in requests.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("usual", "memory", "remat", "rows"), [(60, 110, "none", range(104, 112)), (240, 60, "full", range(120, 240))]
)
def test_next_larger_batch_does_not_fit(needed, usual, memory, remat, rows):
    """Layers are recomputed only if nothing else fits."""
    messages = []
    found, above = batch_search(needed[memory], messages.append, batch=2 * usual).find_largest()
    compiled = found.compiled
    assert compiled.choice.remat == remat and found.rows in rows and found.batch == 2 * found.rows
    assert f"{found.rows} rows per device fit" in messages and f"{above} rows per device are too many" in messages
    assert any(re.fullmatch(r"trying \d+ rows per device \(\d+ (fit|are too many).*\)", text) for text in messages)
    assert compiled.memory.total <= needed[memory]
    traced = trace(toy.Layers(), compiled.options, compiled.choice, 2 * above, compiled.mesh)
    assert not isinstance(compile_traced(traced, needed[memory]), Compiled)


def test_micro_batches_are_those_of_the_request_or_the_recipe(needed):
    found, _ = batch_search(needed[60], batch=8, accumulate=2).find_largest()
    assert found.batch == 4 * found.rows and found.compiled.choice.accumulate == 2
    with pytest.raises(InputError, match="with batch 2 does not fit on 2 x cpu"):
        batch_search(1000, batch=2).find_largest()
    assert default_batch(toy.recipe(defaults={"batch": 20, "accumulate": 4}), 8, None) == 32


def test_batch_auto_is_refused_on_a_cpu_and_for_members(typed):
    with pytest.raises(InputError, match="auto fills the memory of devices, and cpu shares the machine's: give a numb"):
        largest_batch(toy.Layers(), {}, jax.devices()[:1], lambda text: None)
    code, _, err = typed("train", "gpt2-tiny", "--batch", "auto", "--members", "2")
    assert code == 2 and "--batch auto is for one process" in " ".join(err.split())


def test_run_keeps_the_batch_that_was_found(tmp_path, monkeypatch, capsys):
    def first_row():
        return next(Trainer(devices=1).steps(toy.recipe(), steps=4, batch="auto", run=tmp_path / "run")).row

    monkeypatch.setattr(session, "largest_batch", lambda recipe, asked, devices, far: 16)
    assert first_row()["tokens"] == 16
    assert read_config(tmp_path / "run")["train"]["batch"] == 16
    assert "batch 16, the largest that fits" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(session, "largest_batch", lambda *found: pytest.fail("a started run has a batch"))
    assert first_row()["tokens"] == 3 * 16
