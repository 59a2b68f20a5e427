"""A notebook on a slice of two workers: each cell runs on both, and none outlives its kernel."""

import pytest

from tests.remote.cells import opened

pytestmark = pytest.mark.long

SLICE = "v4-usc2b-0"
SUM = """\
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
rows = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
ones = jax.make_array_from_callback((8,), rows, lambda at: jnp.ones(8)[at])
total = float(jax.jit(jnp.sum)(ones))
print(f"sum {total}")
"""


@pytest.fixture(scope="module")
def books_server(books):
    with opened(books, SLICE) as server:
        yield server
    books.run("notebook", SLICE, "--stop")
    books.wait_until_gone("notebook")


@pytest.fixture
def server(books_server):
    yield books_server
    books_server.end_kernels()


def test_cells_run_on_all_workers(server):
    cells = server.kernel()
    shown = cells.run("import jax, os, time; print(jax.device_count(), jax.process_count(), jax.devices())")
    assert shown.text.startswith("8 2 [CpuDevice") and shown.text.count("CpuDevice") == 8, shown
    assert cells.run("os.environ['GREETING']").text == "'hello'\n"
    assert "sum 8.0\n" in cells.run(SUM).text

    # Plots and progress bars are worker 0's.
    plot = cells.run("%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    assert plot.types.count("image/png") == 1
    bar = cells.run("from tqdm import tqdm\nfor _ in tqdm(range(3)): time.sleep(0.01)")
    assert "3/3" in bar.errors and "worker 1" not in bar.errors

    flood = cells.run("print('x' * 100_000_000)")
    assert "data rate exceeded" in flood.errors and "worker 1" not in flood.text
    assert cells.run("1").text == "1\n"

    # A second kernel learns who has the slice, and gets it after the first one.
    other = server.kernel()
    assert "another notebook's kernel has this slice: shut that one down" in other.run("1").error
    cells.shut_down()
    other.restart()
    assert other.run("1").text == "1\n"
