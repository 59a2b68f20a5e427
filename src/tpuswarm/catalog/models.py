"""Look up the shapes of published language models."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tpuswarm.catalog.figures import Source, find_source, read_data


@dataclass(frozen=True)
class PublicModel:
    """A published model, without its weights."""

    name: str
    repository: str
    """On the hub."""
    parameters: int
    config: Mapping[str, Any]
    """What its config.json says about the shape."""
    source: Source


@cache
def public_models() -> Mapping[str, PublicModel]:
    """Return the models by name, the smallest first."""
    found = dict(read_data("models"))
    default = found.pop("source")
    models = [
        PublicModel(
            name, entry["repository"], entry["parameters"], entry["config"], find_source(entry.get("source", default))
        )
        for name, entry in found.items()
    ]
    return {model.name: model for model in sorted(models, key=lambda model: model.parameters)}
