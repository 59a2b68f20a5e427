"""Small PyTorch modules with losses, data, exports, and results in torch."""

import inspect
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuswarm.torch.graph import ExportedModule
from tpuswarm.train.data.arrays import to_numpy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

nn, functional = torch.nn, torch.nn.functional

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
LLAMA_LAYERS = 2
RANDOM = np.random.default_rng(0)
ROWS = {
    "x": RANDOM.normal(size=(4, 8)).astype(np.float32),
    "sequence": RANDOM.normal(size=(4, 6, 8)).astype(np.float32),
    "pixels": RANDOM.normal(size=(4, 3, 16, 16)).astype(np.float32),
    "ids": RANDOM.integers(2, 50, (4, 12)).astype(np.int32),
    "y": RANDOM.integers(0, 5, 4).astype(np.int32),
}


def label_loss(outputs, batch):
    loss = functional.cross_entropy(outputs, batch["y"])
    return loss, {"right": (outputs.argmax(-1) == batch["y"]).float().mean()}


def next_token(outputs, batch):
    return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def mean_square(outputs, batch):
    return (outputs**2).mean()


class LanguageModel(nn.Module):
    """Return the logits of a model of transformers."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids).logits


class EncoderDecoder(LanguageModel):
    def forward(self, ids):
        return self.model(input_ids=ids, decoder_input_ids=ids).logits


class ImageModel(LanguageModel):
    def forward(self, pixels):
        return self.model(pixel_values=pixels).logits


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.out = kind(8, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 5)

    def forward(self, sequence):
        return self.out(self.cells(sequence)[0][:, -1])


class UNetBlock(nn.Module):
    """A block of a diffusion model."""

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


def tiny(name, config, **options):
    kind, sizes = (ImageModel, {"num_labels": 5}) if "Image" in name else (LanguageModel, {"vocab_size": 50})
    kind = EncoderDecoder if name.startswith("T5") else kind
    return kind(getattr(transformers, name)(getattr(transformers, config)(**sizes, **options)))


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)), label_loss, "x y"),
    "cnn": (convolutional, label_loss, "pixels y"),
    "lstm": (lambda: Recurrent(nn.LSTM), label_loss, "sequence y"),
    "gru": (lambda: Recurrent(nn.GRU), label_loss, "sequence y"),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1),
            nn.Flatten(), nn.Linear(48, 5),
        ), label_loss, "sequence y",
    ),
    "unet": (UNetBlock, mean_square, "pixels"),
    "gan": (Adversaries, adversarial, "x"),
    "resnet": (
        lambda: tiny("ResNetForImageClassification", "ResNetConfig", layer_type="basic", depths=[1, 1],
                   hidden_sizes=[8, 16], embedding_size=8),
        label_loss, "pixels y",
    ),
    "convnext": (
        lambda: tiny("ConvNextForImageClassification", "ConvNextConfig", depths=[1, 1], hidden_sizes=[8, 16],
                   num_stages=2, drop_path_rate=0.0),
        label_loss, "pixels y",
    ),
    "vit": (
        lambda: tiny("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=4, num_hidden_layers=1,
                   **SMALL, **NO_DROPOUT),
        label_loss, "pixels y",
    ),
    "gpt2": (
        lambda: tiny("GPT2LMHeadModel", "GPT2Config", n_layer=1, n_embd=32, n_head=4, use_cache=False, resid_pdrop=0.0,
                   embd_pdrop=0.0, attn_pdrop=0.0),
        next_token, "ids",
    ),
    "llama": (
        lambda: tiny("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, num_hidden_layers=LLAMA_LAYERS,
                     use_cache=False, **SMALL),
        next_token, "ids",
    ),
    "bert": (
        lambda: tiny("BertForMaskedLM", "BertConfig", num_hidden_layers=1, **SMALL, **NO_DROPOUT), next_token, "ids",
    ),
    "t5": (
        lambda: tiny("T5ForConditionalGeneration", "T5Config", num_layers=1, d_model=32, d_kv=8, d_ff=64, num_heads=4,
                   dropout_rate=0.0, use_cache=False),
        next_token, "ids",
    ),
}  # fmt: skip


class Traced(NamedTuple):
    """An exported module, shared by all tests; do not change it."""

    module: nn.Module
    loss: object
    rows: dict
    exported: ExportedModule

    @property
    def arrays(self):
        return jax.tree.map(jnp.asarray, dict(self.exported.arrays))


@cache
def trace(name) -> Traced:
    from tpuswarm.torch.export import export

    module, loss, rows = build(name)
    return Traced(module, loss, rows, export(module, loss, rows))


def build(name):
    """Return a module, its loss, and rows by argument name; Sequential calls its argument `input`."""
    torch.manual_seed(0)
    make, loss, names = MODELS[name]
    module, rows = make(), {name: ROWS[name] for name in names.split()}
    if "input" in inspect.signature(module.forward).parameters:
        rows["input"] = rows.pop(names.split()[0])
    return module, loss, rows


def loss_in_torch(module, loss, rows):
    batch = {name: torch.from_numpy(array) for name, array in rows.items()}
    batch = {name: array.long() if array.dtype == torch.int32 else array for name, array in batch.items()}
    inputs = {name: batch[name] for name in rows if name in inspect.signature(module.forward).parameters}
    result = loss(module(**inputs), batch)
    return result[0] if isinstance(result, tuple) else result


def step_in_torch(module, loss, rows):
    """Return loss, gradients and new buffers; leave the module unchanged."""
    before = {name: array.clone() for name, array in module.state_dict().items()}
    module.zero_grad()
    value = loss_in_torch(module, loss, rows)
    value.backward()
    grads = {
        name: to_numpy(param.grad.to_dense().clone())
        for name, param in module.named_parameters()
        if param.grad is not None
    }
    buffers = {name: to_numpy(buffer.clone()) for name, buffer in module.named_buffers()}
    module.load_state_dict(before)
    return float(value.detach()), grads, buffers
