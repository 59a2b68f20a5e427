"""`tpuswarm invite`: let people take part in a run from anywhere."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.completion import complete_runs
from tpuswarm.config.units import parse_seconds
from tpuswarm.errors import InputError
from tpuswarm.swarm.anywhere.invites import GUEST, INVITES, InviteBook, format_moment, refusal
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.run.listing import find_run
from tpuswarm.train.storage.folders import is_url, shown


def invite(
    run: Annotated[str, typer.Argument(help="A run's directory, its name, or `last`.", autocompletion=complete_runs)],
    person: Annotated[
        str | None, typer.Argument(help="Who is invited; their members carry this name (default: guest).")
    ] = None,
    expires: Annotated[str | None, typer.Option(help="Make a new invite that ends after a time, such as 7d.")] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="End this person's access, at once.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List all invites, without their secrets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a person's invite to a run that listens (`train --listen`), or revoke it."""
    folder = Path(find_run(run))
    if is_url(run) and not (folder / INVITES).exists():
        raise InputError(
            f"the invites of {run} are on its head: run this there, in a fleet by `tpuswarm exec HEAD -- python -m "
            f"tpuswarm invite {run}`"
        )
    book = InviteBook(folder)
    if list_all:
        _list(book, as_json)
        return
    if revoke:
        if expires is not None:
            raise InputError("--revoke and --expires exclude each other")
        if person is None:
            raise InputError(f"name the person whose access ends; invited: {', '.join(book.invites()) or 'nobody'}")
        book.revoke(person)
        echo(f"{person} has no access to {shown(folder)} any more", err=True)
        return
    if expires is not None and expires.strip().isdecimal():
        raise InputError(f"--expires needs a unit, such as {expires.strip()}d for days")
    seconds = None if expires is None else parse_seconds(expires, "--expires")
    if seconds == 0:
        raise InputError("--expires must be above 0: use --revoke to end a person's access")
    person = person or GUEST
    before = book.invites().get(person)
    invitation = book.invite(person, seconds)
    made = book.invites()[person]
    if as_json:
        print(json.dumps({"person": person, "address": invitation.address, "invite": str(invitation)}))
        return
    until = "" if made.expires is None else f", until {format_moment(made.expires)}"
    replaced = "; the earlier one is no longer valid" if before not in (None, made) else ""
    echo(f"{person}'s invite, a secret{until}; to join: `tpuswarm join INVITE`{replaced}", err=True)
    print(invitation)


def _list(book: InviteBook, as_json: bool) -> None:
    states = {one: refusal(one, time.time()) or "valid" for one in book.invites().values()}
    if as_json:
        print(json.dumps([{"person": one.person, "expires": one.expires, "state": states[one]} for one in states]))
        return
    for one, state in states.items():
        until = f" until {format_moment(one.expires)}" if one.expires and state == "valid" else ""
        echo(f"{one.person:24}  {state}{until}")
    if not states:
        echo("no invites", err=True)
