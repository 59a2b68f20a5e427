"""The shell completes recipes, their options, values and runs, in the shell that was named."""

import shlex

import pytest

from tests.watch.fake_run import make_plain_run


@pytest.fixture
def complete(typed, monkeypatch):
    """Return the words that bash offers for the last word of a line."""

    def ask(line: str) -> list[str]:
        words = shlex.split(line) + ([""] if line.endswith(" ") else [])
        monkeypatch.setenv("_TPUSWARM_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        code, out, err = typed()
        assert (code, err) == (0, "")
        return out.split()

    return ask


def test_recipes_options_values_and_runs_complete(complete, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_plain_run(tmp_path / "runs/mine", 1)
    (tmp_path / "swarm.toml").touch()
    (tmp_path / "own.py").write_text("raise SystemExit('completion executes a file')")
    assert complete("tpuswarm train gpt2-3") == ["gpt2-355m"]
    assert complete("tpuswarm train s") == [f"stylegan2-{n}" for n in (32, 64, 128, 256, 512, 1024)] + ["swarm.toml"]
    assert {"--lr", "--lr-end", "--layers"} <= set(complete("tpuswarm train gpt2-tiny --l"))
    assert "--lr" not in complete("tpuswarm train own.py:Own --l")
    assert complete("tpuswarm train gpt2-tiny --precision ") == ["bf16", "f32", "highest"]
    assert complete("tpuswarm plan gpt2-tiny --shard f") == ["fsdp"]
    for option in ("--run", "--init-from"):
        assert complete(f"tpuswarm train gpt2-tiny {option} ") == ["runs/mine"]
    for command in ("status", "sample", "logs", "stop", "page", "evaluate", "ledger show"):
        assert complete(f"tpuswarm {command} m") == ["mine"], command


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_is_installed_for_the_named_shell(typed, tmp_path, monkeypatch, shell):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "")  # which the command sets
    code, out, err = typed("--install-completion", shell)
    assert (code, err) == (0, "") and out.startswith(f"{shell} completion installed in {tmp_path}")
    assert not (tmp_path / ".bashrc").exists()
    assert typed("--show-completion", "zsh")[1].startswith("#compdef tpuswarm")
    code, _, err = typed("--install-completion", "tcsh")
    assert code == 2 and "'tcsh' is not one of 'bash', 'zsh'" in err
