"""`train --dry-run`: what would be trained, and where, before JAX is loaded, data is read or a folder is made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuswarm.cli.train.train_options import Asked
from tpuswarm.config.train_table import LENGTH_KEYS
from tpuswarm.train.run.directory import has_begun, read_config


def dry_run(asked: Asked) -> dict[str, str]:
    """What is known of a training, by name, in words. Raises InputError where its folder cannot be used."""
    table, recipe, folder = asked.table, asked.recipe, asked.folder
    begun = read_config(folder) if folder is not None and has_begun(folder) else None
    usual: Mapping[str, Any] = begun["train"] if begun else recipe.defaults
    said = {"recipe": recipe.name, "data": table.data or ("as before" if begun else "the recipe's own")}
    length = next((name for name in LENGTH_KEYS if getattr(table, name) is not None), None)
    if length:
        said["length"] = f"{getattr(table, length):,} {length}"
    elif "steps" in usual:
        said["length"] = f"{usual['steps']:,} steps"
    if table.batch == "auto" and not begun:
        said["batch"] = "as many rows as fit, found by compiling"
    elif batch := (None if table.batch == "auto" else table.batch) or usual.get("batch"):
        said["batch"] = f"{batch:,} rows per step" + ("" if table.batch or begun else ", or more to suit the devices")
    said["devices"] = f"{table.devices}, sharding {table.shard}"
    if asked.swarm is not None:
        said["swarm"] = f"{asked.swarm['members']} members"
    if asked.parent is not None:
        which = f"those that match {table.init_only!r}" if table.init_only else "those"
        said["parameters"] = f"{which} of {table.init_from}"
    if folder is None:
        said["run"] = f"a new folder in ./runs, {recipe.name}-N"
    else:
        said["run"] = f"{folder}, {_stands(folder, begun) if begun else 'new'}"
    return said


def _stands(folder: Path, config: dict[str, Any]) -> str:
    from tpuswarm.swarm.views.status import look
    from tpuswarm.train.run.listing import status

    found: Any = look(folder) if "swarm" in config else status(folder)
    return f"{found.state} at step {found.step:,} of {found.steps:,}"
