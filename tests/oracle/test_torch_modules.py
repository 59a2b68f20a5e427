"""Modules of PyTorch, exported and run in JAX, against torch itself: losses, gradients, buffers, what is trained."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpuswarm import ArraySource, InputError, Trainer
from tpuswarm.torch import recipe, save, state_dict
from tpuswarm.torch.export import export
from tpuswarm.torch.run import run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

nn, functional = torch.nn, torch.nn.functional

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
RANDOM = np.random.default_rng(0)
ROWS = {
    "x": RANDOM.normal(size=(4, 8)).astype(np.float32),
    "sequence": RANDOM.normal(size=(4, 6, 8)).astype(np.float32),
    "pixels": RANDOM.normal(size=(4, 3, 32, 32)).astype(np.float32),
    "ids": RANDOM.integers(2, 50, (4, 12)).astype(np.int32),
    "y": RANDOM.integers(0, 5, 4).astype(np.int32),
}


def classes(outputs, batch):
    loss = functional.cross_entropy(outputs, batch["y"])
    return loss, {"right": (outputs.argmax(-1) == batch["y"]).float().mean()}


def next_token(outputs, batch):
    return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def squared(outputs, batch):
    return (outputs**2).mean()


class Of(nn.Module):
    """A model of transformers, whose answer is an object, with arguments of ours."""

    def __init__(self, model, pixels=False, **more):
        super().__init__()
        self.model, self.pixels, self.more = model, pixels, more

    def forward(self, given):
        found = self.model(**{"pixel_values" if self.pixels else "input_ids": given}, **self.more)
        return found.logits


class OfIds(Of):
    def forward(self, ids):
        return super().forward(ids)


class OfPixels(Of):
    def forward(self, pixels):
        return super().forward(pixels)


class Pair(nn.Module):
    """T5 reads and writes."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, decoder_input_ids=ids).logits


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.out = kind(8, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 5)

    def forward(self, sequence):
        return self.out(self.cells(sequence)[0][:, -1])


class UNetBlock(nn.Module):
    """Down, attention over places, up, joined: what diffusion models are made of."""

    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.Conv2d(11, 3, 3, padding="same")

    def forward(self, pixels):
        x = functional.silu(self.norm(self.down(pixels)))
        places = x.flatten(2).transpose(1, 2)
        x = x + self.attention(places, places, places)[0].transpose(1, 2).reshape(x.shape)
        x = functional.interpolate(functional.avg_pool2d(x, 2), scale_factor=2, mode="bilinear") + x
        return self.out(torch.cat([self.up(x), pixels], 1))


class Adversaries(nn.Module):
    """A generator and what judges it, in one objective."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, 8))
        self.critic = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), nn.ELU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.critic(self.generator(x)), self.critic(x)


def adversarial(outputs, batch):
    fake, real = outputs
    return functional.softplus(fake).mean() + functional.softplus(-real).mean()


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, groups=8, padding_mode="reflect", padding=1), nn.InstanceNorm2d(8, affine=True),
        nn.Hardswish(), nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten(), nn.Linear(48, 5),
    )  # fmt: skip


def of(name, config, **more):
    kind = OfPixels if "Image" in name else OfIds
    wants = {"num_labels": 5} if "Image" in name else {"vocab_size": 50}
    made = getattr(transformers, name)(getattr(transformers, config)(**wants, **more))
    return kind(made, "Image" in name)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)), classes, "x y"),
    "cnn": (convolutional, classes, "pixels y"),
    "lstm": (lambda: Recurrent(nn.LSTM), classes, "sequence y"),
    "gru": (lambda: Recurrent(nn.GRU), classes, "sequence y"),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1),
            nn.Flatten(), nn.Linear(48, 5),
        ), classes, "sequence y",
    ),
    "unet": (UNetBlock, squared, "pixels"),
    "gan": (Adversaries, adversarial, "x"),
    "resnet": (
        lambda: of("ResNetForImageClassification", "ResNetConfig", layer_type="basic", depths=[1, 1],
                   hidden_sizes=[8, 16], embedding_size=8),
        classes, "pixels y",
    ),
    "convnext": (
        lambda: of("ConvNextForImageClassification", "ConvNextConfig", depths=[1, 1], hidden_sizes=[8, 16],
                   num_stages=2, drop_path_rate=0.0),
        classes, "pixels y",
    ),
    "vit": (
        lambda: of("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, **SMALL, **NO_DROPOUT),
        classes, "pixels y",
    ),
    "gpt2": (
        lambda: of("GPT2LMHeadModel", "GPT2Config", n_layer=1, n_embd=32, n_head=4, use_cache=False, resid_pdrop=0.0,
                   embd_pdrop=0.0, attn_pdrop=0.0),
        next_token, "ids",
    ),
    "llama": (
        lambda: of("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, use_cache=False, **SMALL),
        next_token, "ids",
    ),
    "bert": (lambda: of("BertForMaskedLM", "BertConfig", **SMALL, **NO_DROPOUT), next_token, "ids"),
    "t5": (
        lambda: Pair(transformers.T5ForConditionalGeneration(transformers.T5Config(
            num_layers=1, d_model=32, d_kv=8, d_ff=64, num_heads=4, vocab_size=50, dropout_rate=0.0, use_cache=False))),
        next_token, "ids",
    ),
}  # fmt: skip


def first_argument(module, names):
    """Of a Sequential it is called `input`."""
    rows = {name: ROWS[name] for name in names.split()}
    if "input" in inspect.signature(module.forward).parameters:
        rows["input"] = rows.pop(names.split()[0])
    return rows


def in_torch(module, loss, rows):
    """Loss, gradients and buffers afterwards, which are put back."""
    batch = {name: torch.from_numpy(each) for name, each in rows.items()}
    batch = {name: each.long() if each.dtype == torch.int32 else each for name, each in batch.items()}
    before = {name: each.clone() for name, each in module.state_dict().items()}
    module.zero_grad()
    inputs = {name: batch[name] for name in rows if name in inspect.signature(module.forward).parameters}
    found = loss(module(**inputs), batch)
    found = found[0] if isinstance(found, tuple) else found
    found.backward()
    grads = {name: each.grad.numpy().copy() for name, each in module.named_parameters() if each.grad is not None}
    buffers = {name: each.numpy().copy() for name, each in module.named_buffers()}
    module.load_state_dict(before)
    return float(found.detach()), grads, buffers


@pytest.mark.parametrize("name", list(MODELS))
def test_a_module_has_torchs_loss_gradients_and_buffers(name):
    make, loss, names = MODELS[name]
    torch.manual_seed(0)
    module = make()
    rows = first_argument(module, names)
    exported = export(module, loss, rows)
    params = {name: jnp.asarray(each) for name, each in exported.arrays["params"].items()}
    rest = {group: {n: jnp.asarray(a) for n, a in exported.arrays[group].items()} for group in ("buffers", "constants")}
    batch = {name: jnp.asarray(each) for name, each in rows.items()}

    def objective(params):
        found, _, buffers = run(exported.train, {"params": params, **rest}, batch, jax.random.key(0))
        return found, buffers

    expected, grads, after = in_torch(module.train(), loss, rows)
    (found, buffers), gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    largest = max(np.abs(each).max() for each in grads.values())
    assert grads.keys() <= gradient.keys()
    for path, grad in grads.items():
        np.testing.assert_allclose(gradient[path], grad, rtol=0, atol=1e-5 * largest, err_msg=path)
    for path, buffer in buffers.items():
        np.testing.assert_allclose(buffer, after[path], rtol=1e-5, atol=1e-5, err_msg=path)

    expected, _, _ = in_torch(module.eval(), loss, rows)
    found, metrics, _ = jax.jit(lambda p: run(exported.evaluate, {"params": p, **rest}, batch, None))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert set(metrics) == ({"right"} if loss is classes else set())


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "gpt2"])
def test_the_number_of_rows_is_free(name):
    make, loss, names = MODELS[name]
    torch.manual_seed(0)
    module = make()
    rows = first_argument(module, names)
    exported = export(module, loss, rows)
    arrays = {group: {n: jnp.asarray(a) for n, a in found.items()} for group, found in exported.arrays.items()}
    for count in (1, 3):
        some = {each: array[:count] for each, array in rows.items()}
        batch = {each: jnp.asarray(array) for each, array in some.items()}
        found = jax.jit(lambda arrays, batch: run(exported.evaluate, arrays, batch, None)[0])(arrays, batch)
        np.testing.assert_allclose(found, in_torch(module.eval(), loss, some)[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt2"])
def test_it_trains_as_torch_does_and_goes_back(tmp_path, name):
    """200 steps with the same data; the file is what hosts without torch read; the module takes what was trained."""
    make, loss, names = MODELS[name]
    torch.manual_seed(0)
    module = make()
    random = np.random.default_rng(1)
    rows = {each: np.concatenate([array + random.normal(size=array.shape).astype(array.dtype) * 0.1 if
            array.dtype == np.float32 else array for _ in range(8)]) for each, array in
            first_argument(module, names).items()}  # fmt: skip
    save(module, loss, rows, tmp_path / "module.safetensors")
    made = recipe(tmp_path / "module.safetensors", data=rows, optimizer=optax.sgd(0.05), defaults={"batch": 8})
    result = Trainer(devices=2, seed=0).fit(made, steps=200, batch=8, run=tmp_path / "run")

    optimizer = torch.optim.SGD(module.train().parameters(), 0.05)
    losses, source = [], ArraySource(rows, seed=0)
    for step in range(200):
        batch = {each: torch.from_numpy(np.array(array)) for each, array in source.rows(step * 8, 8).items()}
        batch = {each: one.long() if one.dtype == torch.int32 else one for each, one in batch.items()}
        inputs = {each: one for each, one in batch.items() if each in inspect.signature(module.forward).parameters}
        found = loss(module(**inputs), batch)
        found = found[0] if isinstance(found, tuple) else found
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    assert result.metrics["loss"] == pytest.approx(losses[-1], rel=0.01) and losses[-1] < 0.9 * losses[0]
    trained = make()
    trained.load_state_dict(state_dict(tmp_path / "run", trained))
    mine, theirs = (in_torch(each.eval(), loss, {n: a[:8] for n, a in rows.items()})[0] for each in (trained, module))
    assert mine == pytest.approx(theirs, rel=0.01)


class Branches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Writes(nn.Module):
    def forward(self, x):
        x[:, 0] = 0
        return x


class Folds(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(12))

    def forward(self, x):
        return torch.special.bessel_j0(x).sum() * self.w.sum()


@pytest.mark.parametrize(
    ("module", "loss", "data", "said"),
    [
        (Branches, squared, "x", "test_torch_modules.py:.*depends on values of the data"),
        (Writes, squared, "x", "writes into its input: copy it first"),
        (Folds, lambda outputs, batch: outputs, "x", "test_torch_modules.py:.*special_bessel_j0.*has no form in JAX"),
        (lambda: nn.Linear(8, 2), lambda outputs, batch: outputs, "x", "the loss is .*2.*: it has to be a scalar"),
        (lambda: nn.Linear(8, 2), squared, "y", "forward needs input, and the data has y"),
        (lambda: nn.Linear(8, 2, dtype=torch.complex64), squared, "x", "weight is complex"),
        (lambda: nn.Linear(8, 2, device="meta"), squared, "x", "the module is on meta: export needs it on the CPU"),
        (lambda: object(), squared, "x", "object is no torch.nn.Module"),
    ],
    ids=["branch", "in-place", "operator", "scalar", "argument", "complex", "device", "module"],
)  # fmt: skip
def test_what_cannot_be_exported_is_said_with_its_line(module, loss, data, said):
    made = module()
    rows = {"input" if isinstance(made, nn.Linear) and data == "x" else data: ROWS[data]}
    with pytest.raises(InputError, match=said) as error:
        export(made, loss, rows)
    assert "\n" not in str(error.value)


def test_a_module_in_16_bits_trains_in_float32_and_gets_16_back(tmp_path):
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).to(torch.bfloat16)
    rows = {"input": ROWS["x"], "x": ROWS["x"]}

    def loss(outputs, batch):
        return (outputs.float() - batch["x"].float()[:, :2]).square().mean()

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, input):
            return self.inner(input.to(torch.bfloat16))

    made = recipe(Takes(), loss, rows, optax.sgd(0.05))
    first = Trainer(devices=1).fit(made, steps=1, batch=len(ROWS["x"]), run=tmp_path / "a").metrics["loss"]
    theirs = loss(Takes().train()(torch.from_numpy(ROWS["x"])), {"x": torch.from_numpy(ROWS["x"])})
    assert first == pytest.approx(float(theirs.detach()), rel=2e-2)
    Trainer(devices=1).fit(made, steps=30, batch=len(ROWS["x"]), run=tmp_path / "b")
    back = Takes()
    back.load_state_dict(state_dict(tmp_path / "b", back))
    assert back.inner[0].weight.dtype == torch.bfloat16
    after = loss(back.train()(torch.from_numpy(ROWS["x"])), {"x": torch.from_numpy(ROWS["x"])})
    assert float(after.detach()) < 0.8 * first


def test_a_state_dict_of_another_shape_is_refused(tmp_path):
    rows = {"input": ROWS["x"]}
    made = recipe(nn.Linear(8, 2), squared, rows, optax.sgd(0.1))
    Trainer(devices=1).fit(made, steps=1, batch=4, run=tmp_path / "run")
    with pytest.raises(InputError, match=r"weight is \[2, 8\] in .*, and \[3, 8\] in the module: it is another module"):
        state_dict(tmp_path / "run", nn.Linear(8, 3))


def test_dropout_is_drawn_anew_at_each_step_and_not_in_evaluation():
    module = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    exported = export(module, squared, {"input": ROWS["x"]})
    arrays = {group: {n: jnp.asarray(a) for n, a in exported.arrays[group].items()} for group in exported.arrays}
    batch = {"input": jnp.asarray(ROWS["x"])}
    losses = {float(run(exported.train, arrays, batch, jax.random.key(each))[0]) for each in (0, 0, 1)}
    assert len(losses) == 2
    found = [float(run(exported.evaluate, arrays, batch, None)[0]) for _ in range(2)]
    assert found[0] == found[1] == pytest.approx(in_torch(module.eval(), squared, {"input": ROWS["x"]})[0], rel=1e-5)
