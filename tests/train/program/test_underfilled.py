import jax
import jax.numpy as jnp
import pytest

from tests.train.program.test_flops import step_flops
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.program.underfilled import underfilled


def planted(x, narrow, wide):
    """A library function, which JAX traces once, called from two lines."""
    h = jnp.tanh(jnp.einsum("ab,bc->ac", x, narrow))
    return jnp.square(jnp.einsum("ab,bc->ac", h, wide)).mean()


def check(width, batch, unit=128, devices=1):
    shapes = [(batch * devices, 512), (512, width), (width, 512)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    flops = model_flops(jax.jit(jax.grad(planted, (1, 2))).trace(*args).jaxpr)
    return underfilled(flops, unit, batch * devices, devices)


@pytest.mark.parametrize(("width", "batch", "unit"), [(256, 128, 128), (256, 512, 256), (130, 1024, 256)])
def test_tiles_filled_by_more_than_half_are_not_reported(width, batch, unit):
    assert not check(width, batch, unit)


@pytest.mark.parametrize(("width", "unit", "fill"), [(64, 128, 0.5), (32, 128, 0.25), (128, 256, 0.5)])
def test_narrow_layer_is_reported_with_its_lines(width, unit, fill):
    found = check(width, 1024, unit)
    line = planted.__code__.co_firstlineno
    assert {str(finding.place) for finding in found} == {f"{__file__}:{line + 2}", f"{__file__}:{line + 3}"}
    assert all(finding.size == width and finding.fill == fill for finding in found)
    assert sum(finding.waste for finding in found) == pytest.approx(1 - fill)
    assert f"a dimension of {width} fills only {fill:.0%} of the {unit}x{unit} matrix unit" in str(found[0])


def test_batch_of_one_device_counts():
    found = check(256, 32, devices=8)
    assert found and all(finding.size == 32 and finding.fill == 0.25 for finding in found)


def test_small_products_are_not_reported():
    def both(x, large, small):
        return x @ large @ large, small @ small, jnp.vdot(x, x)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 512), (512, 512), (32, 32))]
    assert not underfilled(model_flops(jax.jit(both).trace(*args).jaxpr), 128, 512, 1)


@pytest.mark.parametrize(("form", "unit", "fill"), [("xla", 128, 0.5), ("splash", 256, 0.25)])
def test_only_the_heads_of_gpt2_are_narrow(form, unit, fill):
    found = underfilled(step_flops(GPT2(size="124m", data="fake"), 8, attention=form, loop="scan"), unit, 8, 1)
    described = {(narrow.size, round(narrow.fill, 2), narrow.place.file.rpartition("/")[2]) for narrow in found}
    assert described == {(64, fill, "attention.py")}
