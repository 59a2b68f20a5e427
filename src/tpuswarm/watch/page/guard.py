"""Who may see a page: who has its token, on this computer, from the page itself."""

import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tpuswarm.fleet.store.document import state_folder
from tpuswarm.train.process.atomic import write_atomically

LOOPBACK = "127.0.0.1"


def page_token() -> str:
    """Of this user, who alone may read it; the same each time: an open page comes back when its command does."""
    path = state_folder() / "page-token"
    with suppress(FileNotFoundError):
        if (found := path.read_text(encoding="utf-8").strip()) and path.stat().st_mode & 0o077 == 0:
            return found
    made = secrets.token_urlsafe(24)
    _write(path, made)
    return made


def _write(path: Path, token: str) -> None:
    write_atomically(path, token)
    path.chmod(0o600)


def refusal(headers: Mapping[str, str], asked: str | None, token: str, port: int) -> tuple[int, str] | None:
    """Status and sentence for a request that is not answered; None for one that is. asked: the token in its URL.

    A name that somebody else has pointed at this computer (DNS rebinding) is no name of it, and a page from elsewhere
    may not read this one even with the token.
    """
    own = {f"{name}:{port}" for name in (LOOPBACK, "localhost")}
    if headers.get("host", "") not in own:
        return 403, f"this page is only for {LOOPBACK}:{port}"
    origin = headers.get("origin")
    if origin is not None and origin not in {f"http://{each}" for each in own}:
        return 403, f"a page of {origin} may not read this one"
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    given = asked or (bearer if kind.lower() == "bearer" else "")
    if not secrets.compare_digest(given.encode(), token.encode()):
        return 401, "the token is wrong or missing: open the URL that `tpuswarm page` has printed"
    return None
