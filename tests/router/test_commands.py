"""Commands without root: errors and dry runs."""

import os
import shutil

import pytest

FILE = """outside = "lo"
inside = "lo"
sources = ["10.0.0.0/8"]

[[targets]]
port = 40000
to = "10.0.0.2:22"
"""
HAS_NFT = shutil.which("nft", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@pytest.fixture
def call(monkeypatch, typed, tmp_path):
    """Run `tpuswarm router …` in this process, without root, beside ROUTER.toml; (code, out, err)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    (tmp_path / "ROUTER.toml").write_text(FILE)

    return lambda line: typed("router", *line.split())


@pytest.mark.parametrize("line", ["apply ROUTER.toml --tune", "status", "remove"])
def test_command_without_root_prints_the_sudo_command(call, line):
    code, out, err = call(line)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert err.startswith("error: only root may see or change this machine's rules; run: sudo /")
    assert err.endswith(f"/tpuswarm router {line}\n")


def test_missing_file_is_named(call):
    assert call("show OTHER.toml") == (2, "", "error: there is no file OTHER.toml\n")


@pytest.mark.skipif(not HAS_NFT, reason="there is no nft on this machine")
def test_dry_run_needs_no_root(call):
    code, out, err = call("apply ROUTER.toml --dry-run --tune")
    assert code == 0 and "nft: table ip tpuswarm_router, 1 port, in one transaction\n" in out
    assert out.endswith("nothing was done; the current rules were not read, which needs root\n")
    assert "write /etc/sysctl.d/60-tpuswarm-router.conf" in out
    assert "no target can be reached" not in err
