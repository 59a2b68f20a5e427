"""Read the table [train], from swarm.toml or a separate file."""

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from tpuswarm.config.limits import check_settings
from tpuswarm.config.toml_file import StrictTable, read_toml
from tpuswarm.config.units import parse_count, parse_every, parse_seconds
from tpuswarm.errors import InputError

LENGTH_KEYS = ("steps", "tokens", "epochs")


class Train(StrictTable):
    """[train]; each key is the option of `tpuswarm train` with that name."""

    model_config = ConfigDict(allow_inf_nan=True)  # limits.py refuses them by name

    recipe: str
    """A built-in recipe, or file.py:Recipe."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Options of the recipe itself."""
    data: str | None = None
    """Several places, each with a weight: a list, which is joined as lines."""
    steps: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    batch: int | Literal["auto"] | dict[str, int] | None = None
    """A table gives the batch of each pool by name."""
    devices: str | int | list[int] = "all"
    precision: str | None = None
    shard: str = "auto"
    accumulate: int | None = None
    clip: float | None = None
    freeze: str | None = None
    decay: str | None = None
    ema: float | None = None
    eval_every: str | int | None = None
    eval_batch: int | None = None
    save_every: str | int | None = None
    keep: int | None = None
    keep_best: str | None = None
    grace: float = 10.0
    init_from: str | None = None
    init_only: str | None = None
    run: str | None = None
    seed: int | None = None
    deterministic: bool | None = None
    overfit_batches: int | None = None
    fast_dev_run: bool = False
    profile: bool = False
    wandb: str | None = None
    members: int | None = None
    devices_per_member: int | None = None
    cycle: int | None = None
    outer: str | None = None
    outer_lr: float | None = None
    quantize: str | None = None
    overlap: str | None = None
    ray_address: str | None = None
    dashboard: bool | None = None

    @field_validator("data", mode="before")
    @classmethod
    def _join_data(cls, value: Any) -> Any:
        is_list = isinstance(value, list) and value and all(isinstance(place, str) for place in value)
        return "\n".join(value) if is_list else value

    @field_validator("steps", "tokens", "batch", "eval_batch", "accumulate", mode="before")
    @classmethod
    def _parse_counts(cls, value: Any, field: ValidationInfo) -> Any:
        if value is None or (value == "auto" and field.field_name == "batch"):
            return value
        if isinstance(value, dict) and field.field_name == "batch":
            return {name: _parse(parse_count, rows, f"batch of {name}") for name, rows in value.items()}
        return _parse(parse_count, value, field.field_name)

    @field_validator("grace", mode="before")
    @classmethod
    def _parse_grace(cls, value: Any, field: ValidationInfo) -> Any:
        return _parse(parse_seconds, value, field.field_name)

    @field_validator("save_every", "eval_every")
    @classmethod
    def _check_intervals(cls, value: Any, field: ValidationInfo) -> Any:
        if value is not None:
            _parse(parse_every, value, field.field_name)
        return value

    @field_validator("*")
    @classmethod
    def _check_limits(cls, value: Any, field: ValidationInfo) -> Any:
        for one in value.values() if field.field_name == "batch" and isinstance(value, dict) else [value]:
            if one == "auto":
                continue
            _parse(lambda value, name: check_settings({name: value}), one, field.field_name)
        return value

    @field_validator("run")
    @classmethod
    def _check_run_place(cls, value: str | None) -> str | None:
        if value and "://" in value and not value.startswith("gs://"):
            raise ValueError(f"run takes a local directory or gs://BUCKET/FOLDER, not {value}")
        return value

    @model_validator(mode="after")
    def _check_single_length(self) -> "Train":
        given = [name for name in LENGTH_KEYS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of steps, tokens and epochs, not {' and '.join(given)}")
        return self


class _File(StrictTable):
    train: Train


def read_train(path: Path) -> Train:
    """Read a file with only [train]; raise InputError with the line for anything wrong."""
    return read_toml(path, _File).train


def _parse(parse: Any, value: Any, name: str | None) -> Any:
    try:
        return parse(value, name)
    except InputError as error:
        raise ValueError(str(error)) from error
