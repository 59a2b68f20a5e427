"""A module of PyTorch as a recipe, where torch is not: from its file alone; `make oracle` compares with torch."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import tpuswarm
from tpuswarm import InputError, Trainer
from tpuswarm.torch import op, recipe
from tpuswarm.torch.graph import Dtype, Exported, Graph, Node, Ref, read, shape_alone, write
from tpuswarm.torch.ops import OPS
from tpuswarm.torch.run import run
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.program.request import usual_request
from tpuswarm.train.recipe import Options
from tpuswarm.train.user_code import CodeLine

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
DATA = {"x": X, "y": X @ np.float32([[1], [-2], [3]]) + 0.5}


def graph(train: bool) -> Graph:
    """A line with a running mean of its input, and the mean square of its error."""
    nodes = [
        Node("rows", "sym_size", (Ref("x"), 0), {}),
        Node("shifted", "sub", (Ref("x"), Ref("seen")), {}, "line", "model.py:7"),
        Node("product", "addmm", (Ref("b"), Ref("shifted"), Ref("w")), {}, "line", "model.py:8"),
        Node("error", "sub", (Ref("product"), Ref("y")), {}, "", "model.py:12"),
        Node("flat", "view", (Ref("error"), [Ref("rows")]), {}),
        Node("squares", "pow", (Ref("flat"), 2), {}),
        Node("loss", "mean", (Ref("squares"),), {"dtype": Dtype("float32")}),
        Node("worst", "amax", (Ref("squares"), [0]), {}),
        Node("mean", "mean", (Ref("x"), [0]), {}),
        Node("old", "mul", (Ref("seen"), 0.9), {}),
        Node("after", "add", (Ref("old"), Ref("mean")), {"alpha": 0.1}),
    ]
    arrays = {"w": ("params", "line.weight"), "b": ("params", "line.bias"), "seen": ("buffers", "line.seen")}
    buffers = {"line.seen": Ref("after")} if train else {}
    return Graph(arrays, {"x": "x", "y": "y"}, tuple(nodes), Ref("loss"), {"worst": Ref("worst")}, buffers)


EXPORTED = Exported(
    "Line",
    {
        "params": {"line.weight": np.zeros((3, 1), np.float32), "line.bias": np.zeros(1, np.float32)},
        "buffers": {"line.seen": np.zeros(3, np.float32), "line.num_batches_tracked": np.int32(0)},
        "constants": {},
    },
    {"tied": "line.weight"},
    graph(True),
    graph(False),
)


@pytest.fixture
def file(tmp_path):
    write(tmp_path / "line.safetensors", EXPORTED)
    return tmp_path / "line.safetensors"


def test_the_file_is_what_was_written(file):
    found = read(file)
    assert file.stat().st_mode & 0o777 == 0o644, "whoever trains may be another user"
    assert (found.name, found.tied, found.train, found.evaluate) == ("Line", EXPORTED.tied, graph(True), graph(False))
    np.testing.assert_array_equal(found.arrays["params"]["line.weight"], np.zeros((3, 1)))


def test_it_trains_like_any_recipe_and_keeps_what_it_observes(file, tmp_path):
    made = recipe(file, data={"train": DATA, "validation": DATA}, optimizer=optax.adam(0.1))
    trainer = Trainer(devices=8, seed=0, shard="fsdp", ema=0.9, accumulate=1, eval_every=100)
    result = trainer.fit(made, steps=300, batch=16, run=tmp_path / "run")
    assert result.metrics["loss"] < 1e-2 and result.metrics["worst"] < 0.1
    found = tpuswarm.load(tmp_path / "run")
    np.testing.assert_allclose(found["params"]["line.weight"][:, 0], [1, -2, 3], atol=0.1)
    np.testing.assert_allclose(found["extra"]["line.seen"], X.mean(0), atol=0.2)
    again = trainer.fit(made, steps=310, batch=16, run=tmp_path / "run")
    assert again.metrics["step"] == 310


def test_nothing_of_torch_is_imported_to_train(file):
    script = (
        "import sys, numpy as np, optax, tpuswarm\n"
        f"made = tpuswarm.torch.recipe({str(file)!r}, data=np.load(sys.argv[1]), optimizer=optax.sgd(0.1))\n"
        "from tpuswarm.train.recipe import Options\n"
        "program = made.program(Options())\n"
        "import jax\n"
        "assert program.init(jax.random.key(0)).params['line.weight'].shape == (3, 1)\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'torch']\n"
    )
    np.savez(file.with_suffix(".npz"), **DATA)
    words = [sys.executable, "-c", script.replace("np.load(sys.argv[1])", "dict(np.load(sys.argv[1]))")]
    done = subprocess.run([*words, str(file.with_suffix(".npz"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def arrays() -> dict:
    return {
        group: {name: jnp.asarray(each) for name, each in found.items()} for group, found in EXPORTED.arrays.items()
    }


def test_what_cannot_be_computed_is_said_with_its_line():
    batch = {"x": jnp.zeros((4, 5)), "y": jnp.zeros((4, 1))}
    with pytest.raises(InputError, match=r"^model.py:7: sub of line cannot be computed here: .*\(4, 5\)"):
        run(graph(True), arrays(), batch, None)


def test_operations_are_said_to_be_where_the_module_has_them():
    batch = {"x": jnp.zeros((4, 3)), "y": jnp.zeros((4, 1))}
    slope = jax.grad(lambda arrays: run(graph(True), arrays, batch, None)[0], allow_int=True)
    found = {each.place for each in model_flops(jax.make_jaxpr(slope)(arrays())).products}
    assert found == {CodeLine("model.py", 8)}, "forward and backward"


def test_an_operator_can_be_added(monkeypatch):
    monkeypatch.setattr("tpuswarm.torch.ops.OPS", OPS)

    @op("twice")
    def twice(x):
        return 2 * x

    nodes = (Node("a", "sum", (Ref("x"),), {}), Node("b", "twice", (Ref("a"),), {}))
    found, _, _ = run(Graph({}, {"x": "x"}, nodes, Ref("b"), {}, {}), {}, {"x": jnp.ones(3)}, None)
    del OPS["twice"]
    assert found == 6


def test_operands_become_what_torch_makes_of_them():
    """An array without axes does not widen one with axes, unless it is of a higher kind."""
    half, scalar, whole = jnp.ones(2, jnp.bfloat16), jnp.float32(0.5), jnp.ones(2, jnp.int32)
    with jax.numpy_dtype_promotion("standard"):
        assert OPS["add"](half, scalar).dtype == jnp.bfloat16
        assert OPS["mul"](whole, scalar).dtype == jnp.float32
        assert OPS["add"](whole, 1).dtype == jnp.int32 and OPS["div"](whole, whole).dtype == jnp.float32
        assert OPS["add"](half, jnp.ones(2, jnp.float32)).dtype == jnp.float32


@pytest.mark.parametrize("lead", [(), (1,)])
def test_an_outer_product_is_exact_in_16_bits(lead):
    """Positions by frequencies, as rotary embeddings have them: bfloat16 has no 1001."""
    nodes = (
        Node("angles", "bmm" if lead else "mm", (Ref("at"), Ref("by")), {}),
        Node("last", "amax", (Ref("angles"),), {}),
    )
    batch = {"at": jnp.arange(1002.0).reshape(*lead, -1, 1), "by": jnp.ones((*lead, 1, 4))}
    each = Graph({}, {"at": "at", "by": "by"}, nodes, Ref("last"), {}, {})
    assert run(each, {}, batch, None, Options(precision="bf16"))[0] == 1001


@pytest.mark.parametrize("way", ["masked_fill", "where"])
def test_a_row_that_is_masked_whole_is_a_number_in_16_bits(way):
    """What stands for "never" was traced as the least float32, which is minus infinity in bfloat16."""
    least = float(np.finfo(np.float32).min)
    args = (
        (Ref("scores"), Ref("hidden"), least) if way == "masked_fill" else (Ref("hidden"), Ref("never"), Ref("scores"))
    )
    nodes = (
        Node("scores", "mm", (Ref("x"), Ref("x")), {}),
        Node("masked", way, args, {}),
        Node("weights", "_softmax", (Ref("masked"), -1, False), {}),
        Node("most", "amax", (Ref("weights"),), {}),
    )
    arrays = {"never": ("constants", "never")}
    masked = Graph(arrays, {"x": "x", "hidden": "hidden"}, nodes, Ref("most"), {}, {})
    batch = {"x": jnp.eye(4), "hidden": jnp.ones((4, 4), bool)}
    constants = {"constants": {"never": jnp.float32(least)}}
    assert run(masked, constants, batch, None, Options(precision="bf16"))[0] == 0.25


def test_a_file_from_before_shapes_were_kept_is_read(file):
    with safe_open(file, "numpy") as opened:
        about = json.loads(opened.metadata()["tpuswarm"])
    del about["shapes"]
    save_file(load_file(file), file, {"tpuswarm": json.dumps(about)})
    assert read(file).weights and read(file).train == graph(True)


def test_what_is_no_exported_module_is_refused(tmp_path, file):
    made = {"data": DATA, "optimizer": optax.sgd(0.1)}
    with pytest.raises(InputError, match=r"there is no .*absent: tpuswarm\.torch\.save writes it, where torch is"):
        recipe(tmp_path / "absent", **made)
    (tmp_path / "text").write_text("a text")
    with pytest.raises(InputError, match="text is no exported module"):
        recipe(tmp_path / "text", **made)
    tpuswarm.save({"a": np.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"other\.safetensors is no exported module: tpuswarm\.torch\.save writes one"):
        recipe(tmp_path / "other.safetensors", **made)
    with pytest.raises(InputError, match="has its loss in it: loss=None"):
        recipe(file, lambda outputs, batch: outputs, **made)
    with pytest.raises(InputError, match="an optimizer is missing"):
        recipe(file, data=DATA)
    with pytest.raises(InputError, match=r"pip install 'tpuswarm\[torch\]'; hosts that train need the exported file"):
        recipe(object(), lambda outputs, batch: outputs, **made)


def attending(causal: bool = True) -> Graph:
    """Attention of x [B, T, H, K] with itself."""
    nodes = (
        Node("q", "transpose", (Ref("x"), 1, 2), {}),
        Node(
            "y", "scaled_dot_product_attention", (Ref("q"), Ref("q"), Ref("q"), None, 0.0, causal), {"scale": 0.2},
            "attention", "model.py:5",
        ),
        Node("loss", "mean", (Ref("y"),), {}),
    )  # fmt: skip
    return Graph({}, {"x": "x"}, nodes, Ref("loss"), {}, {})


def attended(options: Options, tokens: int = 256):
    """Its loss, for x of so many tokens, and such an x."""
    x = jax.ShapeDtypeStruct((8, tokens, 4, 64), jnp.float32)
    return jax.jit(lambda x: run(attending(), {}, {"x": x}, None, options)[0]), x


def test_attention_is_the_kernel_of_the_tpu_where_that_can_do_it():
    for tokens, attention, kernels in ((256, "splash", 1), (250, "splash", 0), (256, "xla", 0)):
        loss, x = attended(Options(precision="bf16", platform="tpu", attention=attention), tokens)
        text = loss.trace(x).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == kernels, (tokens, attention)


def test_a_kernel_that_is_split_over_devices_is_where_the_module_has_it(devices):
    loss, x = attended(Options(precision="bf16", platform="tpu", attention="splash"))
    with jax.set_mesh(jax.make_mesh((2,), ("devices",), (AxisType.Auto,), devices=devices[:2])):
        products = model_flops(jax.jit(jax.grad(loss)).trace(x).jaxpr).products
    assert "attention" in {each.kind for each in products}
    assert {each.place for each in products} == {CodeLine("model.py", 5)}, "forward and backward"


def test_attention_is_cudnns_on_a_gpu_in_16_bits(monkeypatch):
    """No GPU is here: what jax.nn is asked for."""
    asked = []

    def kernel(q, k, v, bias=None, mask=None, **given):
        asked.append((q.dtype.name, given.get("implementation"), given["is_causal"], given["scale"]))
        return v

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    for precision in ("bf16", "f32"):
        loss, x = attended(Options(precision=precision, platform="gpu", attention="cudnn"))
        jax.eval_shape(loss, x)
    assert asked == [("bfloat16", "cudnn", True, 0.2), ("float32", None, True, 0.2)]


def test_layers_are_recomputed_where_there_is_attention(file):
    """They cost time, and a TPU v2 or v3 recomputes whatever it may: a convolutional network keeps its activations."""
    assert recipe(file, data=DATA, optimizer=optax.sgd(0.1)).forms == ()
    made = replace(EXPORTED, train=attending(), evaluate=attending())
    write(file, made)
    rows = {"x": np.zeros((8, 6, 2, 4), np.float32)}
    assert recipe(file, data=rows, optimizer=optax.sgd(0.1), micro_batches=True).forms == ("remat", "accumulate")


@pytest.mark.parametrize("asked", [{"precision": "bf16"}, {"accumulate": 2}, {"shard": "fsdp"}])
def test_settings_of_a_run_hold_for_it(file, tmp_path, asked):
    made = recipe(file, data=DATA, optimizer=optax.adam(0.1))
    result = Trainer(devices=4, seed=0, **asked).fit(made, steps=200, batch=16, run=tmp_path / "run")
    assert result.metrics["loss"] < 0.05


def test_a_file_without_weights_has_shapes_to_plan_with(tmp_path):
    nothing = {group: {name: shape_alone(each.shape, each.dtype) for name, each in found.items()}
               for group, found in EXPORTED.arrays.items()}  # fmt: skip
    write(tmp_path / "shapes.safetensors", replace(EXPORTED, arrays=nothing, weights=False))
    made = recipe(tmp_path / "shapes.safetensors", data=DATA, optimizer=optax.sgd(0.1))
    compiled = compile_step(made, usual_request(made, batch=8), jax.devices()[:2])
    assert compiled.flops.total == 2 * (2 * 8 * 3)  # forward, and the gradient of the weights
    with pytest.raises(InputError, match="Line was exported from the meta device, without weights: it can be planned"):
        compiled.init(jax.random.key(0))
