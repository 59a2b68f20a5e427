#!/usr/bin/python3
"""Do what Google's guest agent does: publish the host key, and give users of the metadata accounts and keys."""

import pwd
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

INSTANCE = "http://169.254.169.254/computeMetadata/v1/instance/"
HOST_KEY = Path("/etc/ssh/ssh_host_ed25519_key.pub")


def ask(path: str, value: bytes | None = None) -> str:
    request = urllib.request.Request(
        INSTANCE + path, value, {"Metadata-Flavor": "Google"}, method="GET" if value is None else "PUT"
    )
    try:
        return urllib.request.urlopen(request, timeout=100).read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:  # the machine has no such metadata
            return ""
        raise


def admit(user: str, keys: list[str]) -> None:
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", "--password", "*", user], check=True)
        subprocess.run(["gpasswd", "--add", user, "google-sudoers"], check=True)
        entry = pwd.getpwnam(user)
    folder = Path(entry.pw_dir) / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    file, new = folder / "authorized_keys", folder / "authorized_keys.new"
    new.write_text("".join(f"{key}\n" for key in keys))
    for path in (folder, new):
        subprocess.run(["chown", f"{entry.pw_uid}:{entry.pw_gid}", path], check=True)
    new.chmod(0o600)
    new.replace(file)


def main() -> None:
    kind, key = HOST_KEY.read_text().split()[:2]
    ask(f"guest-attributes/hostkeys/{kind}", key.encode())
    before = None
    while True:
        lines = ask("attributes/ssh-keys")
        if lines != before:
            users: dict[str, list[str]] = {}
            for line in filter(None, lines.splitlines()):
                user, _, value = line.partition(":")
                users.setdefault(user, []).append(value)
            for user, keys in users.items():
                admit(user, keys)
            before = lines
        ask("attributes/ssh-keys?wait_for_change=true&timeout_sec=20")


while True:
    try:
        main()
    except OSError as error:
        print(error, flush=True)
        time.sleep(1)
