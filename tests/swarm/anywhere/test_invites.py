"""Invites: one string per person that can be revoked, expires, and is worth nothing when it was cut."""

import base64
import hashlib
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.errors import InputError
from tpuswarm.swarm.anywhere import invites
from tpuswarm.swarm.anywhere.certificate import CERTIFICATE, ensure_certificate, fingerprint
from tpuswarm.swarm.anywhere.invites import INVITES, PERSON, Invitation, InviteBook, parse_invitation, prepare_listening
from tpuswarm.swarm.supervision import start
from tpuswarm.swarm.views.screen import Screen


@pytest.fixture
def book(tmp_path):
    prepare_listening(tmp_path, "0.0.0.0:8443", "swarm.example.org:8443")
    return InviteBook(tmp_path)


@given(
    st.from_regex(PERSON, fullmatch=True),
    st.text(max_size=40),
    st.sampled_from(["", "ab" * 32]),
)
def test_string_has_everything(person, address, mark):
    invitation = Invitation(address, mark, person, "0f" * 16)
    text = str(invitation)
    assert parse_invitation(f" {text}\n") == invitation
    for cut in (text[:-1], text[:20], text.replace("tps1-", "tps2-"), f"{text}A"):
        with pytest.raises(InputError, match="not a whole invite"):
            parse_invitation(cut)


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 17 + b"\xff@h:1", b"\0" * 17 + b"../../x@h:1"])
def test_forged_string_is_no_invite(content):
    """Not even with a right checksum: the person's name is part of a file's name here."""
    text = base64.urlsafe_b64encode(content + hashlib.sha256(content).digest()[:4]).decode().rstrip("=")
    with pytest.raises(InputError, match="not a whole invite"):
        parse_invitation(f"tps1-{text}")


def test_invite_of_a_person_stays_the_same_until_it_ends(book, tmp_path):
    ada, bob = book.invite("ada"), book.invite("bob")
    assert ada == InviteBook(tmp_path).invite("ada") and ada.secret != bob.secret
    assert book.check("ada", ada.secret, 0.0) is None
    book.revoke("ada")
    assert "revoked" in (InviteBook(tmp_path).check("ada", ada.secret, 0.0) or "")
    assert book.check("bob", bob.secret, 0.0) is None
    again = book.invite("ada")
    assert again.secret != ada.secret and book.check("ada", again.secret, 0.0) is None


@pytest.mark.parametrize("is_log", [False, True])
def test_head_shows_an_invite_on_a_terminal_and_not_in_its_log(book, tmp_path, monkeypatch, capfd, is_log):
    monkeypatch.setattr(start, "writes_timestamped_log", lambda: is_log)
    start.show_invite(Screen(), tmp_path)
    shown = capfd.readouterr().err
    assert "tpuswarm invite" in shown and ("tps1-" in shown) != is_log


def test_changes_at_the_same_time_lose_nothing(book, tmp_path):
    """Such as a revocation, while somebody else is invited."""
    people = [f"p{number}" for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        secrets = list(pool.map(lambda person: InviteBook(tmp_path).invite(person).secret, people))
        list(pool.map(lambda person: InviteBook(tmp_path).revoke(person), people[::2]))
    states = [book.check(person, secret, 0.0) is None for person, secret in zip(people, secrets, strict=True)]
    assert states == [False, True] * 20


def test_wrong_secret_and_unknown_person_get_the_same_answer(book):
    secret = book.invite("ada").secret
    answers = {book.check(*who, 0.0) for who in (("ada", "0" * 32), ("bob", secret), ("", ""), ("ada", "ü"))}
    assert len(answers) == 1 and "does not know this invite" in (answers.pop() or "")


def test_invite_expires_by_the_clock_of_the_head(book):
    invitation = book.invite("ada", seconds=3600.0)
    expires = book.access().invites["ada"].expires
    assert book.check("ada", invitation.secret, expires - 1) is None
    assert "expired" in book.check("ada", invitation.secret, expires + 1)


@pytest.mark.parametrize("person", ["j", "m0", "m12", "a-b", "", "ü", "x" * 25, "a b", "../x"])
def test_name_that_would_be_taken_for_another_member_is_refused(book, person):
    with pytest.raises(InputError, match="cannot be a person's name"):
        book.invite(person)


def test_secrets_are_readable_by_their_owner_only(book, tmp_path):
    book.invite("ada")
    for name in (INVITES, CERTIFICATE):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_certificate_stays_so_that_invites_hold_after_a_restart(book, tmp_path):
    first = book.invite("ada")
    prepare_listening(tmp_path, "8443", "swarm.example.org")
    assert book.invite("ada") == first and first.fingerprint == fingerprint(ensure_certificate(tmp_path))


def test_tunnel_with_a_certificate_of_its_own_needs_no_fingerprint(tmp_path):
    assert prepare_listening(tmp_path, "127.0.0.1:9000", "https://x.trycloudflare.com/") == ("127.0.0.1", 9000)
    invitation = InviteBook(tmp_path).invite("ada")
    assert (invitation.address, invitation.fingerprint) == ("https://x.trycloudflare.com", "")


def test_address_of_a_vm_of_google_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(invites, "external_address", lambda: "203.0.113.7")
    assert prepare_listening(tmp_path, "8443", None) == ("0.0.0.0", 8443)
    assert InviteBook(tmp_path).invite("ada").address == "203.0.113.7:8443"


@pytest.mark.parametrize(
    ("listen", "address", "reason"),
    [
        ("8443", None, "--listen needs --address"),
        ("nowhere", "a.example:1", "--listen"),
        ("0.0.0.0:99999", "a.example:1", "--listen"),
        ("8443", "a.example:99999", "--address"),
    ],
)
def test_impossible_addresses_are_refused(tmp_path, listen, address, reason):
    with pytest.raises(InputError, match=reason):
        prepare_listening(tmp_path, listen, address)


def test_run_that_does_not_listen_has_no_invites(tmp_path):
    with pytest.raises(InputError, match="does not listen"):
        InviteBook(tmp_path).invite("ada")


def test_damaged_file_is_named(book, tmp_path):
    (tmp_path / INVITES).write_text("{")
    with pytest.raises(InputError, match=INVITES):
        book.invite("ada")
