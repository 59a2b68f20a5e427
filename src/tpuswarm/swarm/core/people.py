"""People who were invited to a run: their names, and which members are theirs."""

import re

PERSON = re.compile(r"(?![jm][0-9]*$)[A-Za-z0-9_]{1,24}")
"""A person's name; `j` and `m0` would be taken for members of the swarm itself."""


def person_of(member: str) -> str:
    """Return the person whose member this is, `PERSON-MACHINE`; empty for a member of the swarm itself."""
    person, dash, _ = member.partition("-")
    return person if dash and PERSON.fullmatch(person) else ""
