"""Modules of PyTorch, small, with their losses and rows, and what torch itself finds of them."""

import inspect

import numpy as np
import pytest

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
