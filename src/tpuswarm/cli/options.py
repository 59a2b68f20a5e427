"""Options and arguments that several commands have."""

from typing import Annotated

import typer

Fleets = Annotated[str | None, typer.Option("--fleet", help="The fleet, by name or file. Default: ./swarm.toml.")]
Target = Annotated[str | None, typer.Argument(metavar="[FILE|FLEET]", help="swarm.toml, or a fleet's name.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Listens = Annotated[
    str | None, typer.Option("--ports", metavar="FIRST-LAST", help="TCP ports on which Ray listens. Default: any.")
]
