import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.program.float32 import Float32
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.program.underfilled import Underfilled, underfilled
from tpuswarm.train.recipe import Clock, Options


def planted(x, narrow, wide):
    h = jnp.tanh(x @ narrow)
    return jnp.square(h @ wide).mean()


def check(width, batch, unit=128, devices=1):
    shapes = [(batch * devices, 512), (512, width), (width, 512)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    flops = model_flops(jax.jit(jax.grad(planted, (1, 2))).trace(*args).jaxpr)
    return underfilled(flops, unit, batch * devices, devices)


def test_full_tiles_are_no_news():
    assert not check(256, 128) and not check(256, 512, unit=256)


@pytest.mark.parametrize(
    ("width", "unit", "fill"), [(64, 128, 0.5), (32, 128, 0.25), (128, 256, 0.5), (130, 256, None)]
)
def test_a_narrow_layer_is_named_with_its_lines(width, unit, fill):
    found = check(width, 1024, unit)
    if fill is None:  # more than half
        assert not found
        return
    line = planted.__code__.co_firstlineno
    assert {str(each.place) for each in found} == {f"{__file__}:{line + 1}", f"{__file__}:{line + 2}"}
    assert all(each.size == width and each.fill == fill for each in found)
    assert sum(each.waste for each in found) == pytest.approx(1 - fill)
    assert f"a dimension of {width} fills only {fill:.0%} of the {unit}x{unit} matrix unit" in str(found[0])


def test_a_tiny_model_reads_neither_0_nor_100_percent():
    found = check(2, 4)
    assert found and all("fills only 1/2,048 of the 128x128" in str(each) for each in found), list(map(str, found))
    whole = Underfilled(None, 2, 128, 1 / 2048, 1 - 1 / 2048)
    assert str(whole).endswith("and wastes nearly all of its time; use a multiple of 128")
    assert "products, nearly all FLOPs, although" in str(Float32(None, 0.997, ()))


def test_the_batch_of_one_device_counts():
    found = check(256, 32, devices=8)
    assert found and all(each.size == 32 and each.fill == 0.25 for each in found)


def test_small_products_make_no_noise():
    def both(x, large, small):
        return x @ large @ large, small @ small, jnp.vdot(x, x)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 512), (512, 512), (32, 32))]
    assert not underfilled(model_flops(jax.jit(both).trace(*args).jaxpr), 128, 512, 1)


@pytest.mark.parametrize(("form", "unit", "fill"), [("xla", 128, 0.5), ("splash", 128, 0.5), ("xla", 256, 0.25)])
def test_gpt2s_heads_of_64_fill_half_a_unit(form, unit, fill):
    """Known of GPT-2, whatever runs it: heads are 64 wide; nothing else is found."""
    program = GPT2(size="124m", data="fake").program(Options(attention=form, loop="scan"))
    state = jax.eval_shape(program.init, jax.random.key(0))
    clock = Clock(jax.random.key(0), np.int32(0), np.float32(0))
    flops = model_flops(jax.jit(program.step).trace(state, program.batch_spec(8), clock).jaxpr)
    found = underfilled(flops, unit, 8, 1)
    assert {(each.size, round(each.fill, 2), each.place.file.rpartition("/")[2]) for each in found} == {
        (64, fill, "attention.py")
    }
