"""Decide who may see a page: only requests of this computer, from the page itself, with its token."""

import secrets
from collections.abc import Mapping
from contextlib import suppress

from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.computer import state_folder

LOOPBACK = "127.0.0.1"


def page_token() -> str:
    """Return the token of this user; it stays the same, so that an open page reconnects to a new command."""
    path = state_folder() / "page-token"
    with suppress(FileNotFoundError):
        if (token := path.read_text(encoding="utf-8").strip()) and path.stat().st_mode & 0o077 == 0:
            return token
    token = secrets.token_urlsafe(24)
    write_atomically(path, token, 0o600, is_shared=True)
    return token


def refuse_request(headers: Mapping[str, str], url_token: str | None, token: str, port: int) -> tuple[int, str] | None:
    """Return status and sentence of a refusal; None: answer the request. url_token: the token in its URL.

    Other host names are refused (DNS rebinding), and so are other pages even with the token.
    """
    own = {f"{name}:{port}" for name in (LOOPBACK, "localhost")}
    if headers.get("host", "") not in own:
        return 403, f"this page is only for {LOOPBACK}:{port}"
    origin = headers.get("origin")
    if origin is not None and origin not in {f"http://{name}" for name in own}:
        return 403, f"a page of {origin} may not read this one"
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    given = url_token or (bearer if kind.lower() == "bearer" else "")
    if not secrets.compare_digest(given.encode(), token.encode()):
        return 401, "the token is wrong or missing: open the URL that `tpuswarm page` printed"
    return None
