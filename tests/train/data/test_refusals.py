"""Data that cannot be read, and worker processes that fail."""

import os
import signal
import subprocess
import sys

import numpy as np
import optax
import pytest

from tests.train import toy
from tests.train.data.test_adapters import ROWS, TUPLES, Loader
from tests.train.test_user_faults import ERRORS
from tpuswarm import IndexedSource, InputError, StreamSource, supervised


class Rows(list):
    """A user's own data set."""

    def __getitem__(self, number):
        return super().__getitem__(number)


def indexed(item):
    return IndexedSource(Rows([{"x": np.ones(3), "y": 1}] * 5 + [item]))


def streamed(item):
    return StreamSource(lambda: iter([{"x": np.ones(3), "y": 1}] * 5 + [item]), batched=False)


def fewer(count):
    class Fewer(Rows):
        def __getitems__(self, numbers):
            return [{"x": 1}] * (len(numbers) - 1)

    return IndexedSource(Fewer([0] * count))


UNLIKE = [
    ({"x": np.ones(3)}, r"row \d of the data has y, and row \d of the data does not: give all the same names"),
    ({"x": np.ones(3), "y": 1, "z": 2}, "row 5 of the data has z, and row . of the data does not"),
    ({"x": np.ones(4), "y": 1}, r"x has shape \(.,\) in row . of the data, and \(.,\) in row .*: pad or cut it"),
    (
        {"x": [[1], [2, 3]], "y": 1},
        "x of row 5 of the data is not an array: ValueError: .*inhomogeneous.*; pad or cut it",
    ),
    ({"x": np.ones(3), "y": "text"}, "y of row 5 of the data is a str .*, not an array of numbers: leave it out"),
    ({"x": np.ones(3), "y": None}, "y of row 5 of the data is a NoneType"),
    ({}, "row 5 of the data is an empty dict"),
    ((1, 2), "row 5 of the data is a tuple of 2 parts, and 0 names are given"),
]
"""Items that differ from the others of their data."""


def lengths(*shapes):
    return StreamSource([{"x": np.ones(shape)} for shape in shapes])


def recipe_data(data):
    return supervised(toy.init, toy.loss, optax.sgd(0.1), data).data("train")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: IndexedSource(iter([])), "list_iterator has no length: .*; use StreamSource"),
        (lambda: IndexedSource([]), "list has no rows"),
        (lambda: IndexedSource(TUPLES).rows(0, 2), r"is a tuple of 2 parts, and 0 names are given: .*names=\['im"),
        *(
            (lambda item=item: indexed(item).rows(0, 6), rf"{words}.*\(.*test_refusals.py:\d+\)")
            for item, words in UNLIKE
        ),
        *((lambda item=item: streamed(item).rows(0, 6), r".*\(.*test_refusals.py:\d+\)") for item, _ in UNLIKE),
        (lambda: fewer(6).rows(0, 6), r"the data gives 5 items for 6 rows \(.*test_refusals.py:\d+\)"),
        (lambda: StreamSource(iter([{"x": ROWS["x"]}])), "can be read only once, but .* give a function"),
        (lambda: StreamSource(lambda: iter([])).rows(0, 1), "the stream has no rows: it ended as soon as it began"),
        (lambda: StreamSource([ROWS | {"y": 3}]).rows(0, 1), "arrays of different rows: .*; use batched=False"),
        (lambda: lengths((4, 3), (4, 5)).rows(0, 8), r"x of the data has rows of shape \(3,\) and of \(5,\).*: pad or"),
        (lambda: StreamSource([ROWS, {"x": ROWS["x"]}]).rows(0, 100), "some items of the data have y, others do not"),
        (lambda: IndexedSource([{"x": print}, lambda: 0], workers=2).rows(0, 2), "list cannot be sent to worker proc"),
        (lambda: recipe_data(Loader(3)), "is a Loader: give .*IndexedSource and StreamSource make one of"),
        (lambda: StreamSource([], rows_per_epoch=0), "number of rows, 1 or more"),
        (lambda: StreamSource([], rows_per_epoch=10.5), "number of rows, 1 or more"),
        (lambda: StreamSource(5), "takes an iterable, or a function that makes one, not 5"),
        (lambda: StreamSource(lambda: 5).rows(0, 1), r"the stream's function returned 5.*test_refusals\.py"),
    ],
)
def test_unreadable_data_is_refused_with_the_reason(make, words):
    with pytest.raises(InputError, match=words):
        make()


FAULTS = [*ERRORS.values(), KeyboardInterrupt]
PRESSED, EXITS, KILLED = range(len(FAULTS), len(FAULTS) + 3)


class Faulty:
    """Items that each raise an error; before the last three the process gets Ctrl-C, exits, and is killed."""

    def __len__(self):
        return len(FAULTS) + 3

    def __getitem__(self, number):
        if number == PRESSED:  # at a terminal, Ctrl-C reaches all processes
            os.kill(os.getpid(), signal.SIGINT)
            return {"x": number}
        if number == EXITS:
            os._exit(3)
        if number == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        raise FAULTS[number]()


@pytest.fixture(scope="module")
def read_in_worker():
    """Read an item of `Faulty` in a worker process."""
    source = IndexedSource(Faulty(), workers=1, seed=0)
    order = source.row_numbers(0, len(Faulty())).tolist()
    return lambda number: source.rows(order.index(number), 1)["x"].tolist()


def test_every_error_in_a_worker_arrives_as_a_sentence(read_in_worker):
    words = r"^a sentence$|^the data fails in a worker process: .*test_(refusals|user_faults).py:"
    for number, fault in enumerate(FAULTS):
        is_ctrl_c = fault is KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt) if is_ctrl_c else pytest.raises(InputError, match=words):
            read_in_worker(number)


@pytest.mark.parametrize(("number", "words"), [(EXITS, "ended with exit code 3"), (KILLED, "was ended by SIGKILL; is")])
def test_worker_leaves_ctrl_c_to_the_program_and_is_replaced_if_it_dies(read_in_worker, number, words):
    assert read_in_worker(PRESSED) == [PRESSED]
    with pytest.raises(InputError, match=f"a process that reads rows {words}"):
        read_in_worker(number)


class Failing:
    """A stream with a connection that fails once."""

    def __init__(self):
        self.fails = True

    def __iter__(self):
        return Failing.Items(self)

    class Items:
        def __init__(self, stream):
            self._stream, self._number = stream, 0

        def __iter__(self):
            return self

        def __next__(self):
            self._number += 1
            if self._number == 3 and self._stream.fails:
                self._stream.fails = False
                raise ConnectionError("lost")
            return {"x": self._number}


def test_stream_that_failed_continues_with_the_same_rows():
    source = StreamSource(Failing(), batched=False)
    with pytest.raises(InputError, match=r"ConnectionError: lost \(.*test_refusals.py:\d+\)"):
        source.rows(0, 4)
    assert source.rows(0, 4)["x"].tolist() == [1, 2, 3, 4]


IN_A_NOTEBOOK = """
from multiprocessing import get_context

from tpuswarm import IndexedSource


class Pairs:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": index}


    def __init__(self):
        self.lock = get_context("spawn").Lock()  # can be sent only to a starting process


print(IndexedSource(Pairs()).rows(0, 3)["x"].shape)
try:
    IndexedSource([Pairs()], workers=2).rows(0, 1)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_dataset_defined_in_a_notebook_is_read_without_workers_and_refused_by_name_with_them():
    """Otherwise a worker process ends with a traceback, and the run only guesses the cause."""
    words = [sys.executable, "-c", IN_A_NOTEBOOK]  # without a file, like a notebook
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(3,)\nInputError Pairs is defined in a notebook")
    assert "leave out workers" in done.stdout and done.stderr == ""
