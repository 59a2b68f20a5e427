"""Commands about invites say what holds, what ends, and what does not exist."""

import re

import pytest

from tpuswarm.swarm.anywhere.invites import InviteBook


@pytest.fixture
def run(tmp_path):
    """The folder of a run that listens, with invites of two people."""
    folder = tmp_path / "run"
    book = InviteBook(folder)
    book.set_address("127.0.0.1:1", "ab" * 32)
    for person in ("guest", "ada"):
        book.invite(person)
    return folder


def test_revoking_needs_a_name(run, typed):
    code, _, err = typed("invite", str(run), "--revoke")
    assert code == 2 and "name the person whose access ends; invited: guest, ada" in err
    assert all(not invite.revoked for invite in InviteBook(run).invites().values())


def test_run_that_does_not_exist_is_not_made(tmp_path, typed):
    code, _, err = typed("invite", str(tmp_path / "nowhere"), "ada")
    assert code == 2 and "there is no run" in err and not (tmp_path / "nowhere").exists()


def test_invite_says_until_when_it_holds_and_what_it_replaces(run, typed):
    _, out, err = typed("invite", str(run), "ada")
    assert "until" not in err and "no longer" not in err
    _, new, err = typed("invite", str(run), "ada", "--expires", "7d")
    assert new != out and re.search(r"until \d{4}-\d\d-\d\d \d\d:\d\d; .*; the earlier one is no longer", err), err
    _, listed, _ = typed("invite", str(run), "--list")
    assert re.search(r"ada +valid until \d{4}-", listed) and re.search(r"guest +valid$", listed, re.M), listed
    assert typed("invite", str(run), "ada", "--expires", "0s")[0] == 2
    code, _, err = typed("invite", str(run), "ada", "--expires", "7")
    assert code == 2 and "needs a unit, such as 7d" in err
    typed("invite", str(run), "ada", "--revoke")
    assert "the earlier one is no longer valid" in typed("invite", str(run), "ada")[2]


@pytest.mark.parametrize(
    ("given", "words"), [("hello", "hello is no invite"), ("-", "the first line of stdin is no invite")]
)
def test_what_is_no_invite_is_called_so(given, words, typed, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", (tmp_path / "empty").open("w+"))
    code, _, err = typed("join", given)
    assert code == 2 and words in err, err
