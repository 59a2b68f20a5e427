"""A LightningModule trains as in torch, or is refused with one sentence."""

import copy
import json

import jax
import numpy as np
import optax
import pytest
from jax._src import xla_bridge
from tests.oracle.zoo import nn, torch
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, RMSprop, lr_scheduler

from tpuswarm import InputError, Trainer
from tpuswarm.torch import recipe, save
from tpuswarm.torch.lightning import optimizer_of
from tpuswarm.train.recipe import Clock, Options

X = np.random.default_rng(0).uniform(-1, 1, (32, 2)).astype(np.float32)
DATA = {"x": X, "y": (np.hypot(*X.T) < 0.7).astype(np.int32)}
BATCH = 8


class LightningModule(nn.Module):
    """What tpuswarm reads of Lightning's class; it is no dependency of the tests."""

    automatic_optimization = True
    _trainer = None

    def log(self, name, value, **options): ...

    def validation_step(self, batch, batch_idx): ...

    def on_train_epoch_end(self): ...

    @property
    def global_step(self):
        return self._trainer.global_step if self._trainer else 0


class Classifier(LightningModule):
    """Two layers, and an optimizer that a test chooses."""

    def __init__(self, configure=lambda module: Adam(module.parameters(), 0.05)):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.configure = nn.Linear(2, 8), nn.Linear(8, 2), configure

    def forward(self, x):
        return self.head(self.body(x).relu())

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return self.configure(self)


def without_bias_decay(module):
    return [
        {"params": [module.body.weight, module.head.weight]},
        {"params": [module.body.bias, module.head.bias], "weight_decay": 0.0},
    ]


def with_scheduler(scheduler, **settings):
    def configure(module):
        optimizer = SGD(module.parameters(), 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler(optimizer), **settings}}

    return configure


def warm_up(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=5, cycle_momentum=False)


CONVERTED = {
    "adam": lambda module: Adam(module.parameters(), 0.05, (0.8, 0.95), eps=1e-3, weight_decay=0.1),
    "adamw": lambda module: AdamW(module.parameters(), 0.05, weight_decay=0.3),
    "adamw-groups": lambda module: AdamW(without_bias_decay(module), 0.05, weight_decay=0.3),
    "adamw-head": lambda module: AdamW(
        [{"params": module.head.parameters(), "weight_decay": 0.3}, {"params": module.body.parameters()}],
        0.05,
        weight_decay=0.0,
    ),
    "adamw-part": lambda module: AdamW(module.head.parameters(), 0.05),
    "sgd": lambda module: SGD(module.parameters(), 0.5),
    "sgd-momentum": lambda module: [SGD(module.parameters(), 0.5, momentum=0.9, weight_decay=0.1)],
    "sgd-nesterov": lambda module: SGD(module.parameters(), 0.5, momentum=0.9, weight_decay=0.1, nesterov=True),
    "warm-up": with_scheduler(warm_up, interval="step"),
    "every-second-step": with_scheduler(lambda sgd: lr_scheduler.ExponentialLR(sgd, 0.5), interval="step", frequency=2),
    "one-cycle": with_scheduler(one_cycle, interval="step"),
    "epochs": with_scheduler(lambda sgd: lr_scheduler.StepLR(sgd, 1, 0.1)),
}


def test_scheduler_steps_after_exactly_so_many_steps():
    module = Classifier(with_scheduler(lambda sgd: lr_scheduler.StepLR(sgd, 1), interval="step", frequency=41))
    schedule = jax.jit(optimizer_of(module).schedule)
    rates = [float(schedule(np.int32(step))) for step in (0, 40, 41, 81, 82, 122, 123)]
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005, 0.0005])


@pytest.mark.parametrize("case", CONVERTED)
def test_five_steps_end_where_torch_ends(case):
    """An epoch has four steps here."""
    module = Classifier(CONVERTED[case])
    theirs = copy.deepcopy(module)
    ours = recipe(module, data=DATA)
    program, source = ours.program(Options(decay=ours.defaults.get("decay"))), ours.data("train")
    state = program.init(jax.random.key(0), program.weights())
    step = jax.jit(program.step)
    result = CONVERTED[case](theirs)
    result = result[0] if isinstance(result, list) else result
    optimizer, scheduler = (result["optimizer"], result["lr_scheduler"]) if isinstance(result, dict) else (result, {})
    every = scheduler.get("frequency", 1) if scheduler.get("interval") == "step" else 4
    for number in range(5):
        rows = source.rows(number * BATCH, BATCH)
        state, _ = step(state, rows, Clock(jax.random.key(number), np.int32(number), np.float32(number / 5)))
        optimizer.zero_grad()
        theirs.training_step([torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"]).long()], number).backward()
        optimizer.step()
        if scheduler and (number + 1) % every == 0:
            scheduler["scheduler"].step()
    for name, param in theirs.named_parameters():
        np.testing.assert_allclose(state.params[name], param.detach(), rtol=1e-4, atol=1e-5, err_msg=name)


def test_logged_values_and_validation_step_reach_the_metrics(tmp_path):
    class Module(Classifier):
        def training_step(self, batch, batch_idx):
            return functional.cross_entropy(self(batch["x"]), batch["y"])

        def validation_step(self, batch, batch_idx):
            outputs = self(batch[0])
            self.log("val_loss", 2 * functional.cross_entropy(outputs, batch[1]))
            self.log("right", (outputs.argmax(-1) == batch[1]).float().mean())

    run = tmp_path / "run"
    module_recipe = recipe(Module(), data={"train": DATA, "validation": DATA})
    Trainer(devices=1, eval_every=5).fit(module_recipe, steps=5, batch=32, run=run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluation = next(row for row in rows if "eval_loss" in row)
    assert evaluation["eval_loss"] == evaluation["eval_val_loss"] > 1.2 * rows[4]["loss"]
    assert 0 <= evaluation["eval_right"] <= 1


@pytest.mark.parametrize(
    ("module", "call"),
    [(Classifier(), r"recipe\(module, data=…\)"), (nn.Linear(2, 2), r"recipe\(module, loss, data, ")],
)
def test_trainer_names_the_recipe_of_a_module(module, call):
    with pytest.raises(InputError, match=f"make a recipe of it with tpuswarm.torch.{call}"):
        Trainer(devices=1).fit(module)


def test_module_and_its_parts_stay_as_they_were():
    class Nested(Classifier):
        def __init__(self):
            super().__init__()
            self.part = Classifier()

        def training_step(self, batch, batch_idx):
            return self.part.training_step(batch, batch_idx)

    module = Nested()
    before = [set(vars(part)) for part in module.modules()]
    nested = recipe(module, data=DATA)
    assert [set(vars(part)) for part in module.modules()] == before
    assert nested.exported.train.metrics.keys() == {"train_loss"}


def test_batch_can_be_read_like_a_dict():
    class Module(Classifier):
        def training_step(self, batch, batch_idx):
            assert "x" in batch and "mask" not in batch and batch.get("mask") is None
            assert dict(batch).keys() == {"x", "y"} and len(list(batch.values())) == 2
            return functional.cross_entropy(self(batch.get("x")), batch["y"])

    recipe(Module(), data=DATA)


def test_recipe_does_not_start_jax_before_several_hosts_have_joined(monkeypatch):
    monkeypatch.setattr(xla_bridge, "get_backend", None)
    module = Classifier(CONVERTED["adamw-groups"])
    module.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))
    assert recipe(module, data=DATA).exported.arrays["buffers"]["scale"].dtype == np.float32


def test_exported_lightning_module_trains_from_its_file(tmp_path):
    save(Classifier(), None, DATA, tmp_path / "module.safetensors")
    from_file = recipe(tmp_path / "module.safetensors", data=DATA, optimizer=optax.adam(0.05))
    result = Trainer(devices=1).fit(from_file, steps=2, batch=8, run=tmp_path / "run")
    assert result.metrics["train_loss"] == result.metrics["loss"]


def refused(configure=None, **methods):
    """Return a module with other methods, or another optimizer."""
    return type("Module", (Classifier,), methods)(*([configure] if configure else []))


class Mean:
    """A metric of torchmetrics."""


REFUSED = {
    "optimizer": (refused(lambda module: RMSprop(module.parameters())), "configure_optimizers makes RMSprop, which"),
    "amsgrad": (refused(lambda module: Adam(module.parameters(), amsgrad=True)), "Adam with amsgrad"),
    "dampening": (
        refused(lambda module: SGD(module.parameters(), momentum=0.9, dampening=0.5)), "SGD with dampening"
    ),
    "two": (refused(lambda module: [Adam(module.body.parameters()), Adam(module.head.parameters())]), "2 optimizers"),
    "none": (refused(lambda module: None), "makes NoneType"),
    "empty": (refused(lambda module: []), "0 optimizers"),
    "no optimizer": (refused(lambda module: {"optim": 1}), 'returns a dict with optim: it needs "optimizer"'),
    "no scheduler": (
        refused(lambda module: {"optimizer": Adam(module.parameters()), "lr_scheduler": {"interval": "step"}}),
        'returns a dict with interval: it needs "scheduler"',
    ),
    "rates": (
        refused(lambda module: SGD([{"params": part.parameters(), "lr": rate}
                                    for part, rate in ((module.body, 1.0), (module.head, 0.1))])),
        "parameter groups with the learning rates 1 and 0.1",
    ),
    "plateau": (refused(with_scheduler(lr_scheduler.ReduceLROnPlateau)), "ReduceLROnPlateau"),
    "cycle": (
        refused(lambda module: [[sgd := SGD(module.parameters(), 0.1, momentum=0.9)],
                                [lr_scheduler.OneCycleLR(sgd, 0.5, total_steps=5)]]),
        "cycles momentum",
    ),
    "manual": (refused(automatic_optimization=False), "Module optimizes manually: write a Program"),
    "hook": (refused(on_train_epoch_end=lambda module: None), "Module overrides on_train_epoch_end, which tpuswarm"),
    "no loss": (refused(training_step=lambda module, batch: None), "training_step of Module gives no loss"),
    "counter": (
        refused(training_step=lambda module, batch: module(batch["x"]).mean() * module.global_step),
        "training_step reads global_step of Lightning's Trainer",
    ),
    "metric": (
        refused(training_step=lambda module, batch: module.log("right", Mean())),
        "training_step logs right as a Mean, which gathers over an epoch",
    ),
    "name": (
        refused(training_step=lambda module, batch: module(batch["image"]).mean()),
        r"reads batch\['image'\], but the data has x, y",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_with_one_sentence(case):
    module, message = REFUSED[case]
    with pytest.raises(InputError, match=message) as error:
        recipe(module, data=DATA)
    assert "\n" not in str(error.value)


def test_schedule_that_changes_for_ever_ends_the_run_after_its_table():
    ours = recipe(Classifier(with_scheduler(one_cycle, interval="step")), data=DATA)
    rates = [float(ours._schedule(np.int32(step))) for step in (4, 5)]
    assert rates[0] > 0
    assert np.isnan(rates[1])
