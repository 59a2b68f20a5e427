"""A module of PyTorch, planned from its file."""

import numpy as np
import pytest

from tests.plan.test_sizes import plan
from tpuswarm.torch.graph import Exported, Graph, Node, Ref, shape_alone, write

pytestmark = pytest.mark.slow

RECIPE = """
import numpy as np
import optax
import tpuswarm

def make():
    data = {{"x": np.zeros((1, 256, 128), np.float32)}}
    return tpuswarm.torch.recipe("{file}", data=data, optimizer=optax.adam(1e-3))
"""


def test_torch_module_gets_the_attention_and_layers_of_the_generation(tmp_path):
    """Splash on a v5e; plain attention in recomputed layers on a v3. The file has no weights."""
    nodes = [Node("rows", "sym_size", (Ref("x"), 0), {})]
    before = "x"
    for layer in ("layers.0", "layers.1"):
        at = f"{layer}.attention"
        nodes += [
            Node(f"{at}.p", "view", (Ref(before), [Ref("rows"), 256, 2, 64]), {}, at, "model.py:7"),
            Node(f"{at}.q", "transpose", (Ref(f"{at}.p"), 1, 2), {}, at, "model.py:7"),
            Node(
                f"{at}.y", "scaled_dot_product_attention", (Ref(f"{at}.q"),) * 3 + (None, 0.0, True), {}, at, "m.py:8"
            ),
            Node(f"{at}.t", "transpose", (Ref(f"{at}.y"), 1, 2), {}, at, "model.py:9"),
            Node(f"{at}.z", "reshape", (Ref(f"{at}.t"), [Ref("rows"), 256, 128]), {}, at, "model.py:9"),
            Node(f"{at}.o", "matmul", (Ref(f"{at}.z"), Ref("w")), {}, at, "model.py:10"),
        ]
        before = f"{at}.o"
    nodes += [Node("squares", "pow", (Ref(before), 2), {}), Node("loss", "mean", (Ref("squares"),), {})]
    graph = Graph({"w": ("params", "w")}, {"x": "x"}, tuple(nodes), Ref("loss"), {}, {})
    params = {"w": shape_alone((128, 128), np.float32)}
    exported = Exported(
        "Small", {"params": params, "buffers": {}, "constants": {}}, {}, graph, graph, (), weights=False
    )
    write(tmp_path / "small.safetensors", exported)
    (tmp_path / "small.py").write_text(RECIPE.format(file=tmp_path / "small.safetensors"))
    rows = plan(f"{tmp_path / 'small.py'}:make", "--batch", "16", on=("v3-8", "v5e-8"))
    found = {name: (row["fits"], row["remat"], row["attention"]) for name, row in rows.items()}
    assert found == {"v3-8": (True, "dots", "xla"), "v5e-8": (True, "none", "splash")}
