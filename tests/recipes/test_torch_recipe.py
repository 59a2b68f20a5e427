"""Train an exported PyTorch module without torch; tests/oracle compares with torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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
from tpuswarm.torch.graph import (
    Dtype,
    ExportedModule,
    Graph,
    IndexLimit,
    Node,
    Ref,
    RowFormula,
    read,
    write,
    zeros_without_memory,
)
from tpuswarm.torch.interpreter import run_graph
from tpuswarm.torch.ops import OPS
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.program.request import default_request
from tpuswarm.train.recipe import Options
from tpuswarm.train.user_code import CodeLine

GOLDEN = Path(__file__).with_name("golden")
X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
DATA = {"x": X, "y": X @ np.float32([[1], [-2], [3]]) + 0.5}


def graph(train: bool) -> Graph:
    """Return a linear model with a running mean of its input, its squared error and the gradients."""
    rows = RowFormula(((1.0, 1.0),))
    nodes = [
        Node("shifted", "sub", (Ref("x"), Ref("seen")), {}, "line", "model.py:7"),
        Node("product", "addmm", (Ref("b"), Ref("shifted"), Ref("w")), {}, "line", "model.py:8"),
        Node("error", "sub", (Ref("product"), Ref("y")), {}, "", "model.py:12"),
        Node("flat", "view", (Ref("error"), [rows]), {}),
        Node("squares", "pow", (Ref("flat"), 2), {}),
        Node("loss", "mean", (Ref("squares"),), {"dtype": Dtype("float32")}),
        Node("worst", "amax", (Ref("squares"), [0]), {}),
        Node("mean", "mean", (Ref("x"), [0]), {}),
        Node("old", "mul", (Ref("seen"), 0.9), {}),
        Node("after", "add", (Ref("old"), Ref("mean")), {"alpha": 0.1}),
    ]
    backward = [
        Node("twice", "mul", (Ref("error"), 2), {}, "", "model.py:12"),
        Node("slope", "div", (Ref("twice"), rows), {}, "", "model.py:12"),
        Node("turned", "t", (Ref("shifted"),), {}, "line", "model.py:8"),
        Node("of_w", "mm", (Ref("turned"), Ref("slope")), {}, "line", "model.py:8"),
        Node("of_b", "sum", (Ref("slope"), [0]), {}, "line", "model.py:8"),
    ]
    arrays = {"w": ("params", "line.weight"), "b": ("params", "line.bias"), "seen": ("buffers", "line.seen")}
    buffers = {"line.seen": Ref("after")} if train else {}
    gradients = {"line.weight": Ref("of_w"), "line.bias": Ref("of_b")} if train else {}
    all_nodes = (*nodes, *(backward if train else ()))
    batch, metrics = {"x": "x", "y": "y"}, {"worst": Ref("worst")}
    return Graph(arrays, batch, all_nodes, Ref("loss"), metrics, buffers, gradients, len(nodes))


EXPORTED = ExportedModule(
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


def test_file_is_read_as_it_was_written(file):
    assert file.stat().st_mode & 0o777 == 0o644, "another user may train"
    found = read(file)
    assert (found.name, found.tied, found.train, found.evaluate) == ("Line", EXPORTED.tied, graph(True), graph(False))
    np.testing.assert_array_equal(found.arrays["params"]["line.weight"], np.zeros((3, 1)))


def test_file_of_the_earlier_format_is_read():
    """The version before format 3 wrote it from the same module."""
    found = read(GOLDEN / "module-format-2.safetensors")
    limit = IndexLimit("y", ((0, 0, None, 1),), 9, -100, "model.py:3")
    assert (found.train, found.evaluate) == (replace(graph(True), index_limits=(limit,)), graph(False))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (1, r"comes from an older tpuswarm; export it again with tpuswarm\.torch\.save"),
        (4, "format 4 is unknown to tpuswarm .*, which reads format 3; use the version that wrote it"),
    ],
)
def test_file_of_another_version_is_refused(file, form, message):
    with safe_open(file, "numpy") as opened:
        about = json.loads(opened.metadata()["tpuswarm"]) | {"format": f"tpuswarm torch {form}"}
    save_file(load_file(file), file, {"tpuswarm": json.dumps(about)})
    with pytest.raises(InputError, match=message):
        read(file)


def test_unknown_operator_in_a_file_is_refused(tmp_path):
    """The exporting process may have registered it, or an older version may have had it."""
    theirs = Node("theirs", "mine.twice", (Ref("x"),), {}, "line", "model.py:7")
    write(tmp_path / "line.safetensors", replace(EXPORTED, evaluate=replace(graph(False), nodes=(theirs,))))
    message = r'^model\.py:7: mine\.twice of line is not implemented .*; export the module again .*op\("mine\.twice"\)'
    with pytest.raises(InputError, match=message):
        recipe(tmp_path / "line.safetensors", data=DATA, optimizer=optax.adam(0.1))


def test_module_trains_and_resumes_with_its_buffers(file, tmp_path):
    module_recipe = recipe(file, data={"train": DATA, "validation": DATA}, optimizer=optax.adam(0.1))
    trainer = Trainer(devices=8, seed=0, shard="fsdp", ema=0.9, accumulate=1, eval_every=100)
    result = trainer.fit(module_recipe, steps=200, batch=16, run=tmp_path / "run")
    assert result.metrics["loss"] < 1e-2 and result.metrics["worst"] < 0.1
    found = tpuswarm.load(tmp_path / "run")
    np.testing.assert_allclose(found["params"]["line.weight"][:, 0], [1, -2, 3], atol=0.1)
    np.testing.assert_allclose(found["extra"]["line.seen"], X.mean(0), atol=0.2)
    assert trainer.fit(module_recipe, steps=210, batch=16, run=tmp_path / "run").metrics["step"] == 210


def test_module_trains_in_bf16_with_micro_batches(file, tmp_path):
    module_recipe = recipe(file, data=DATA, optimizer=optax.adam(0.1))
    trainer = Trainer(devices=8, seed=0, precision="bf16", accumulate=2)
    assert trainer.fit(module_recipe, steps=200, batch=16, run=tmp_path / "run").metrics["loss"] < 0.05


TRAIN = """
import sys
import jax, numpy as np, optax, tpuswarm
from tpuswarm.train.recipe import Options

file, data = sys.argv[1:]
module_recipe = tpuswarm.torch.recipe(file, data=dict(np.load(data)), optimizer=optax.sgd(0.1))
assert module_recipe.program(Options()).init(jax.random.key(0)).params["line.weight"].shape == (3, 1)
assert not [name for name in sys.modules if name.split(".")[0] == "torch"]
"""


def test_training_does_not_import_torch(file, tmp_path):
    np.savez(tmp_path / "data.npz", **DATA)
    subprocess.run([sys.executable, "-c", TRAIN, file, tmp_path / "data.npz"], check=True)


ARRAYS = jax.tree.map(jnp.asarray, dict(EXPORTED.arrays))


def test_failing_operation_is_named_with_its_line():
    batch = {"x": jnp.zeros((4, 5)), "y": jnp.zeros((4, 1))}
    with pytest.raises(InputError, match=r"^model.py:7: sub of line failed in JAX: .*\(4, 5\)"):
        run_graph(graph(True), ARRAYS, batch, None)


def test_products_have_the_line_of_the_module():
    batch = {"x": jnp.zeros((4, 3)), "y": jnp.zeros((4, 1))}
    step = jax.make_jaxpr(lambda arrays: run_graph(graph(True), arrays, batch, None))(ARRAYS)
    found = {product.place for product in model_flops(step).products}
    assert found == {CodeLine("model.py", 8)}, "forward and backward"


def test_operator_can_be_added(monkeypatch):
    monkeypatch.setattr("tpuswarm.torch.ops.OPS", OPS)

    @op("twice")
    def twice(x):
        return 2 * x

    nodes = (Node("a", "sum", (Ref("x"),), {}), Node("b", "twice", (Ref("a"),), {}))
    found = run_graph(Graph({}, {"x": "x"}, nodes, Ref("b"), {}, {}), {}, {"x": jnp.ones(3)}, None).loss
    del OPS["twice"]
    assert found == 6


def test_scalar_array_does_not_widen_others_unless_it_is_of_a_higher_kind():
    half, scalar, whole = jnp.ones(2, jnp.bfloat16), jnp.float32(0.5), jnp.ones(2, jnp.int32)
    with jax.numpy_dtype_promotion("standard"):
        assert OPS["add"](half, scalar).dtype == jnp.bfloat16
        assert OPS["mul"](whole, scalar).dtype == jnp.float32
        assert OPS["add"](whole, 1).dtype == jnp.int32 and OPS["div"](whole, whole).dtype == jnp.float32
        assert OPS["add"](half, jnp.ones(2, jnp.float32)).dtype == jnp.float32


@pytest.mark.parametrize("lead", [(), (1,)])
def test_outer_product_is_exact_in_16_bits(lead):
    """Rotary embeddings multiply positions by frequencies; bfloat16 cannot represent 1001."""
    nodes = (
        Node("angles", "bmm" if lead else "mm", (Ref("at"), Ref("by")), {}),
        Node("last", "amax", (Ref("angles"),), {}),
    )
    batch = {"at": jnp.arange(1002.0).reshape(*lead, -1, 1), "by": jnp.ones((*lead, 1, 4))}
    outer = Graph({}, {"at": "at", "by": "by"}, nodes, Ref("last"), {}, {})
    assert run_graph(outer, {}, batch, None, Options(precision="bf16"))[0] == 1001


MIN_FLOAT32 = float(np.finfo(np.float32).min)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        ("masked_fill", (Ref("scores"), Ref("hidden"), MIN_FLOAT32)),
        ("where", (Ref("hidden"), Ref("never"), Ref("scores"))),
    ],
)
def test_fully_masked_row_is_finite_in_16_bits(operator, args):
    """The mask contains the smallest float32, which would be minus infinity in bfloat16."""
    nodes = (
        Node("scores", "mm", (Ref("x"), Ref("x")), {}),
        Node("masked", operator, args, {}),
        Node("weights", "_softmax", (Ref("masked"), -1, False), {}),
        Node("most", "amax", (Ref("weights"),), {}),
    )
    arrays = {"never": ("constants", "never")}
    masked = Graph(arrays, {"x": "x", "hidden": "hidden"}, nodes, Ref("most"), {}, {})
    batch = {"x": jnp.eye(4), "hidden": jnp.ones((4, 4), bool)}
    constants = {"constants": {"never": jnp.float32(MIN_FLOAT32)}}
    assert run_graph(masked, constants, batch, None, Options(precision="bf16"))[0] == 0.25


def test_other_files_and_arguments_are_refused(tmp_path, file):
    (tmp_path / "text").write_text("a text")
    tpuswarm.save({"a": np.zeros(2)}, tmp_path / "other.safetensors")
    for words, module, *loss in (
        (r"absent does not exist; tpuswarm\.torch\.save writes it", tmp_path / "absent"),
        ("text is not an exported module", tmp_path / "text"),
        (
            r"other\.safetensors is not an exported module; tpuswarm\.torch\.save writes one",
            tmp_path / "other.safetensors",
        ),
        ("contains its loss; leave loss out", file, lambda outputs, batch: outputs),
        (
            r"needs torch \(pip install 'tpuswarm\[torch\]'\)",
            object(),
            lambda outputs, batch: 0,
        ),
    ):
        with pytest.raises(InputError, match=words):
            recipe(module, *loss, data=DATA, optimizer=optax.sgd(0.1))
    with pytest.raises(InputError, match="an optimizer is missing"):
        recipe(file, data=DATA)


SELF_ATTENTION = (Ref("q"), Ref("q"), Ref("q"), None, 0.0, True, 0.2, False), {}
ATTENTION = Graph(
    {}, {"x": "x"},
    (
        Node("q", "transpose", (Ref("x"), 1, 2), {}),
        Node("y", "tpuswarm.attention", *SELF_ATTENTION, "attention", "model.py:5"),
        Node("loss", "mean", (Ref("y"),), {}),
    ),
    Ref("loss"), {}, {},
)  # fmt: skip
"""Self-attention of x [B, T, H, K]."""


def attention_loss(options: Options, tokens: int = 256):
    """Return the loss of attention, and the shape of x."""
    x = jax.ShapeDtypeStruct((8, tokens, 4, 64), jnp.float32)
    return jax.jit(lambda x: run_graph(ATTENTION, {}, {"x": x}, None, options)[0]), x


def test_attention_uses_the_tpu_kernel_if_it_supports_the_shape():
    for tokens, attention, kernels in ((256, "splash", 1), (250, "splash", 0), (256, "xla", 0)):
        loss, x = attention_loss(Options(precision="bf16", platform="tpu", attention=attention), tokens)
        text = loss.trace(x).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == kernels, (tokens, attention)


def test_kernel_split_over_devices_has_the_line_of_the_module(devices):
    loss, x = attention_loss(Options(precision="bf16", platform="tpu", attention="splash"))
    with jax.set_mesh(jax.make_mesh((2,), ("devices",), (AxisType.Auto,), devices=devices[:2])):
        products = model_flops(jax.jit(jax.grad(loss)).trace(x).jaxpr).products
    assert "attention" in {product.kind for product in products}
    assert {product.place for product in products} == {CodeLine("model.py", 5)}, "forward and backward"


def test_attention_requests_cudnn_on_a_gpu_in_16_bits(monkeypatch):
    requests = []

    def kernel(q, k, v, bias=None, mask=None, **given):
        requests.append((q.dtype.name, given.get("implementation"), given["is_causal"], given["scale"]))
        return v

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    for precision in ("bf16", "f32"):
        loss, x = attention_loss(Options(precision=precision, platform="gpu", attention="cudnn"))
        jax.eval_shape(loss, x)
    assert requests == [("bfloat16", "cudnn", True, 0.2), ("float32", None, True, 0.2)]


def test_layers_are_recomputed_only_with_attention(file):
    assert recipe(file, data=DATA, optimizer=optax.sgd(0.1)).forms == ()
    write(file, replace(EXPORTED, train=ATTENTION, evaluate=ATTENTION))
    rows = {"x": np.zeros((8, 6, 2, 4), np.float32)}
    assert recipe(file, data=rows, optimizer=optax.sgd(0.1), micro_batches=True).forms == ("remat", "accumulate")


def test_file_without_weights_can_be_planned_and_not_trained(tmp_path):
    shapes = {
        group: {name: zeros_without_memory(array.shape, array.dtype) for name, array in arrays.items()}
        for group, arrays in EXPORTED.arrays.items()
    }
    write(tmp_path / "shapes.safetensors", replace(EXPORTED, arrays=shapes, has_weights=False))
    module_recipe = recipe(tmp_path / "shapes.safetensors", data=DATA, optimizer=optax.sgd(0.1))
    compiled = compile_step(module_recipe, default_request(module_recipe, batch=8), jax.devices()[:2])
    assert compiled.flops.total == 2 * (2 * 8 * 3)  # forward, and the gradient of the weights
    with pytest.raises(
        InputError, match="Line was exported from the meta device without weights and can only be planned"
    ):
        compiled.init(jax.random.key(0))
