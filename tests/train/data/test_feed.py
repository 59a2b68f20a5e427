"""The feed reads ahead; no object of the user's is called from two threads at once; readers get rows of their own."""

import threading
import time
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from tpuswarm import Every, IndexedSource, InputError, StreamSource, Trainer, supervised
from tpuswarm.train.data.feed import Feed
from tpuswarm.train.data.source import ArraySource
from tpuswarm.train.run.directory import METRICS, read_rows

ROWS, BATCH, STEPS = 24, 8, 12


class Entered:
    """Fails if a second call enters it before the first has returned."""

    def __init__(self):
        self.threads = set()
        self._inside = threading.Lock()

    @contextmanager
    def __call__(self):
        assert self._inside.acquire(blocking=False), "entered twice"
        try:
            self.threads.add(threading.get_ident())
            time.sleep(0.002)
            yield
        finally:
            self._inside.release()


class Dataset:
    """Rows by number, which one thread at a time may read."""

    def __init__(self):
        self.entered = Entered()

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        with self.entered():
            return {"x": np.float32(row)}


class Rows:
    """A source of the user's own, whose rows lie in one array."""

    rows_per_epoch, in_memory = ROWS, False

    def __init__(self):
        self.entered, self._array = Entered(), np.empty(ROWS, np.float32)

    def rows(self, start, count):
        with self.entered():
            self._array[:count] = np.arange(start, start + count) % ROWS
            return {"x": self._array[:count]}


class RowsInMemory(Rows):
    """A source that is read without a thread if it is quick."""

    in_memory = True


class Positioned(Rows):
    """A source that tells each checkpoint where it is."""

    def position(self, row):
        with self.entered():
            return {"row": row}

    def go_to(self, position):
        pass


def streamed(entered):
    def items():
        for row in range(ROWS):
            with entered():
                item = {"x": np.float32(row)}
            yield item

    return StreamSource(items, batched=False, rows_per_epoch=ROWS)


def train(folder, data, **options):
    """Train; return the mean of `x` in each step and in each evaluation."""

    def loss(params, batch, key):
        return jnp.square(params["w"]), {"mean": batch["x"].mean()}

    recipe = supervised(lambda key: {"w": jnp.ones(())}, loss, optax.sgd(0.1), data)
    has_validation = isinstance(data, dict) or "overfit_batches" in options
    trainer = Trainer(devices=1, eval_every=2 if has_validation else None, seed=0, **options)
    trainer.fit(recipe, steps=STEPS, batch=BATCH, run=folder)
    rows = list(read_rows(folder / METRICS))
    return [row["mean"] for row in rows if "mean" in row], [row["eval_mean"] for row in rows if "eval_mean" in row]


def in_order(steps=STEPS):
    return [float(np.mean((np.arange(BATCH) + BATCH * step) % ROWS)) for step in range(steps)]


SHARED = {
    "dataset": (Dataset(), lambda dataset: [IndexedSource(dataset, seed=1) for _ in range(2)]),
    "source": (Rows(), lambda rows: [rows, rows]),
    "source in memory": (RowsInMemory(), lambda rows: [rows, rows]),
    "function": (Entered(), lambda entered: [streamed(entered), streamed(entered)]),
}


@pytest.mark.parametrize(("shared", "make"), SHARED.values(), ids=SHARED)
def test_splits_may_share_their_data(tmp_path, shared, make):
    """A thread reads training data ahead while the loop evaluates; each split reads its own rows."""
    training, validation = make(shared)
    steps, evaluations = train(tmp_path / "run", {"train": training, "validation": validation})
    alone, _ = make(type(shared)())
    assert steps == [alone.rows(step * BATCH, BATCH)["x"].mean() for step in range(STEPS)]
    assert evaluations == [np.arange(ROWS).mean()] * (STEPS // 2)
    assert len(getattr(shared, "entered", shared).threads) == 2


def test_checkpoint_waits_for_the_reader_before_it_takes_the_position(tmp_path):
    source = Positioned()
    steps, _ = train(tmp_path / "run", source, save_every=1)
    assert steps == in_order() and len(source.entered.threads) == 2


def test_one_stream_for_two_splits_is_refused(tmp_path):
    stream = streamed(Entered())
    with pytest.raises(InputError, match=r"are one StreamSource.*give each split a StreamSource of its own"):
        train(tmp_path / "run", {"train": stream, "validation": stream})


def test_batches_to_overfit_are_read_once(tmp_path):
    """Read again, an unseeded shuffle would give other rows."""
    random = np.random.default_rng(0)

    def items():
        yield {"x": random.normal(size=64).astype(np.float32)}

    steps, evaluations = train(tmp_path / "run", StreamSource(items), overfit_batches=2)
    assert steps == steps[:2] * (STEPS // 2) and evaluations == pytest.approx([np.mean(steps[:2])] * (STEPS // 2))


def test_hooks_and_loggers_are_called_from_the_thread_of_the_loop(tmp_path):
    entered = Entered()

    class Log:
        def write(self, row):
            with entered():
                pass

        def close(self):
            pass

    def look(step):
        with entered():
            pass

    train(tmp_path / "run", Rows(), overfit_batches=1, hooks=[Every(1, look)], loggers=[Log()])
    assert entered.threads == {threading.get_ident()}


SPEC = {"x": jax.ShapeDtypeStruct((4,), np.dtype(np.int64))}


def feed(source, first=0, last=10, spec=SPEC):
    return Feed(source, spec, SingleDeviceSharding(jax.devices()[0]), first, last)


class Counter:
    """Row n is n; `before` is called with the first row of each batch, before it is read."""

    def __init__(self, before=lambda start: None, in_memory=False, first=0):
        self.in_memory, self._before, self._first = in_memory, before, first

    def rows(self, start, count):
        self._before(start)
        return {"x": self._first + np.arange(start, start + count)}


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name == "feed"]


def test_feed_reads_no_more_than_two_batches_ahead_and_can_be_left():
    """Each batch takes device memory as soon as it is read."""
    read = {start: threading.Event() for start in range(0, 40, 4)}
    with feed(Counter(lambda start: read[start].set())) as batches:
        assert read[4].wait(300) and not read[8].wait(0.3)
        batches.next()
        assert read[8].wait(300)
    assert not feed_threads()


def test_fast_source_needs_no_thread_until_it_becomes_slow():
    slow, read = threading.Event(), []
    source = Counter(lambda start: time.sleep(0.02 * slow.is_set()), in_memory=True)
    with feed(source, last=10**6) as batches:

        def read_until(done):
            while not done():
                read.append(int(batches.next()[0]["x"][0]))

        read_until(lambda: not feed_threads())
        slow.set()
        read_until(feed_threads)
        slow.clear()
        read_until(lambda: not feed_threads())
    assert read == list(range(0, 4 * len(read), 4))


def test_files_always_keep_the_thread(tmp_path):
    """A file may block while a save is due, or be read in large parts."""
    np.save(tmp_path / "x.npy", np.arange(400))
    source = ArraySource({"x": np.load(tmp_path / "x.npy", mmap_mode="r")}, seed=0)
    with feed(source, last=100) as batches:
        for _ in range(90):
            batches.next()
            assert feed_threads()


def fails(start):
    raise OSError("the bucket is gone")


@pytest.mark.parametrize(
    ("source", "good", "words"),
    [
        (Counter(lambda start: start and fails(start)), 1, r"OSError: the bucket is gone \(.*test_feed.py:"),
        (ArraySource({"x": np.zeros((9, 2), np.float32)}), 0, r"\(4, 2\), 'float32'.*\(4,\), 'int64'"),
        (Counter(first=2**31 - 6), 1, "x holds 2147483648, too large for int32"),
    ],
)
def test_error_of_the_source_is_raised_where_the_batch_is_taken(source, good, words):
    with feed(source) as batches:
        for _ in range(good):
            batches.next()
        with pytest.raises(InputError, match=words):
            batches.next()
