"""Invites: what a person needs to take part in a run from anywhere, in one string."""

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tpuswarm.config.units import parse_address
from tpuswarm.errors import InputError
from tpuswarm.swarm.core.people import PERSON
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.metadata import external_address

INVITES = "invites.json"
"""File in the run's folder, readable by its owner only."""
PREFIX = "tps1-"
SECRET_BYTES = 16
GUEST = "guest"
"""The person of the invite that the head prints at its start."""
_CHECK_BYTES = 4
"""Bytes of a checksum, so that a string that was copied only in part is noticed."""


@dataclass(frozen=True)
class Invite:
    """One person's access to a run."""

    person: str
    secret: str
    """128 random bits in hexadecimal."""
    expires: float | None = None
    """Seconds since 1970 by the head's clock; None if it does not expire."""
    revoked: bool = False


@dataclass(frozen=True)
class Access:
    """How members reach a run, and who may."""

    address: str
    fingerprint: str
    invites: dict[str, Invite]
    """By person, in the order in which they were made."""

    def invitation(self, person: str) -> "Invitation":
        return Invitation(self.address, self.fingerprint, person, self.invites[person].secret)


@dataclass(frozen=True)
class Invitation:
    """The content of the string."""

    address: str
    """HOST:PORT, or https://… for a server whose certificate the usual authorities confirm."""
    fingerprint: str
    """SHA-256 of the server's certificate in hexadecimal; empty for an address with https://."""
    person: str
    secret: str

    def __str__(self) -> str:
        """Return the string that `tpuswarm join` takes: secret, fingerprint, `PERSON@ADDRESS`, checksum, in base64."""
        secret, mark = bytes.fromhex(self.secret), bytes.fromhex(self.fingerprint)
        content = bytes([len(mark)]) + secret + mark + f"{self.person}@{self.address}".encode()
        return PREFIX + base64.urlsafe_b64encode(content + _check(content)).decode().rstrip("=")


def parse_invitation(text: str) -> Invitation:
    """Read the string. Raise InputError."""
    text = text.strip()
    wrong = InputError("this is not a whole invite: it is one word that begins with tps1-; copy it again")
    coded = text.removeprefix(PREFIX)
    try:
        content = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise wrong from error
    content, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
    if not text.startswith(PREFIX) or check != _check(content) or len(content) <= SECRET_BYTES:
        raise wrong
    end = 1 + SECRET_BYTES + content[0]
    person, _, address = content[end:].decode(errors="replace").partition("@")
    if not PERSON.fullmatch(person):
        raise wrong  # it names a file here
    return Invitation(address, content[1 + SECRET_BYTES : end].hex(), person, content[1 : 1 + SECRET_BYTES].hex())


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECK_BYTES]


_ACCESS: TypeAdapter[Access] = TypeAdapter(Access)


class InviteBook:
    """The invites of a run, in its folder. Several processes may use it; a change holds at the next request."""

    def __init__(self, folder: Path):
        self._path = folder / INVITES
        self._stamp: tuple[int, int] | None = None
        self._access: Access | None = None

    def access(self) -> Access | None:
        """Return the content; None if the run never listened. Raise InputError for a damaged file."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        if self._stamp != (found.st_mtime_ns, found.st_ino):
            try:
                self._access = _ACCESS.validate_json(self._path.read_bytes())
            except ValidationError as error:
                raise InputError(f"{self._path} is damaged; delete it and start the run's command again") from error
            self._stamp = (found.st_mtime_ns, found.st_ino)
        return self._access

    def invites(self) -> Mapping[str, Invite]:
        """Return all invites by person; none if the run never listened. Raise InputError for a damaged file."""
        known = self.access()
        return known.invites if known else {}

    def set_address(self, address: str, fingerprint: str) -> None:
        """Note where members reach the run; keep its invites."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._changing():
            known = self.access()
            self._write(Access(address, fingerprint, known.invites if known else {}))

    def invite(self, person: str, seconds: float | None = None) -> Invitation:
        """Return a person's invitation; make it if there is none, if it does not hold any more, or for another time.

        seconds: until it expires. Raise InputError for an impossible name, and for a run that does not listen.
        """
        if not PERSON.fullmatch(person):
            raise InputError(f"{person!r} cannot be a person's name: use 1 to 24 letters, digits and underscores")
        with self._changing():
            known = self._require_access()
            invite = known.invites.get(person)
            if invite is None or seconds is not None or refusal(invite, time.time()) is not None:
                end = None if seconds is None else time.time() + seconds
                invite = Invite(person, secrets.token_hex(SECRET_BYTES), end)
                known = replace(known, invites={**known.invites, person: invite})
                self._write(known)
        return known.invitation(person)

    def revoke(self, person: str) -> None:
        """End a person's access. Raise InputError if nobody of that name was invited."""
        with self._changing():
            known = self._require_access()
            if person not in known.invites:
                invited = ", ".join(known.invites) or "nobody"
                raise InputError(f"nobody named {person!r} was invited; invited: {invited}")
            invite = replace(known.invites[person], revoked=True)
            self._write(replace(known, invites={**known.invites, person: invite}))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Let no other process change the file meanwhile. Raise InputError if there is no such run."""
        try:
            folder = os.open(self._path.parent, os.O_RDONLY)
        except FileNotFoundError:
            raise InputError(f"there is no run {self._path.parent}") from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _require_access(self) -> Access:
        if (known := self.access()) is None:
            raise InputError(
                f"{self._path.parent} does not listen to members from anywhere; start its command with --listen and "
                "--address"
            )
        return known

    def _write(self, access: Access) -> None:
        write_atomically(self._path, _ACCESS.dump_json(access, indent=1), mode=0o600)

    def check(self, person: str, secret: str, now: float) -> str | None:
        """Return why this secret does not let a person in, None if it does. now: seconds since 1970."""
        known = self.access()
        invite = known.invites.get(person) if known else None
        expected = invite.secret if invite else secrets.token_hex(SECRET_BYTES)  # as slow as for a person who exists
        if not hmac.compare_digest(expected.encode(), secret.encode()) or invite is None:
            return "the swarm does not know this invite; ask for a new one"
        return refusal(invite, now)


def refusal(invite: Invite, now: float) -> str | None:
    """Return why an invite does not hold any more, None if it does."""
    if invite.revoked:
        return f"the invite of {invite.person} was revoked; ask for a new one"
    if invite.expires is not None and now > invite.expires:
        moment = format_moment(invite.expires)
        return f"the invite of {invite.person} expired at {moment} by the swarm's clock; ask for a new one"
    return None


def format_moment(seconds: float) -> str:
    """Return seconds since 1970 as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def prepare_listening(folder: Path, listen: str, address: str | None) -> tuple[str, int]:
    """Note in a run's folder how members reach it; return the host and port to listen on.

    listen: HOST:PORT, or only a port for all addresses of this machine; address: as members see it, by default the
    external address of a VM of Google's. Raise InputError.
    """
    from tpuswarm.swarm.anywhere.certificate import ensure_certificate, fingerprint

    host, port = parse_address(listen if ":" in listen else f"0.0.0.0:{listen}", "--listen")
    address = address or external_address()
    if address is None:
        raise InputError(
            "--listen needs --address: the HOST:PORT at which others reach this machine, or the https:// address of a "
            "tunnel to it. Only a VM of Google's with an external address knows its own"
        )
    if not address.startswith("https://"):
        name, _, given = address.rpartition(":")
        address = address if name and given.isdigit() else f"{address}:{port}"
        parse_address(address, "--address")
    has_own_certificate = address.startswith("https://")
    mark = "" if has_own_certificate else fingerprint(ensure_certificate(folder))
    InviteBook(folder).set_address(address.rstrip("/"), mark)
    return host, port
