"""Commands on one real machine."""

import re
import signal

import pytest

from tests.real.cloud import RealCloud
from tests.waiting import until

pytestmark = pytest.mark.real
MACHINE = "v2-usc1f-0"


def lines(laptop: RealCloud, command: str, rc: int = 0) -> list[str]:
    """Return the lines that a command prints on the machine."""
    shown = laptop.run("exec", MACHINE, "--", command, rc=rc)
    return [line.partition(" │ ")[2] for line in shown.splitlines() if " │ " in line]


def test_second_set_up_has_nothing_to_do(laptop):
    shown = laptop.run("setup")
    assert "begun" not in shown and f"{MACHINE}/0 is set up" in shown


@pytest.mark.parametrize("words", [("exec", MACHINE, "--"), ("ssh", MACHINE, "--")])
def test_programs_get_the_environment(laptop, words):
    script = 'import os, sys; print(os.environ["GREETING"], sys.executable)'
    assert re.search(r"hello /home/maria/\.tpuswarm/venv/bin/python", laptop.run(*words, f"python -c '{script}'"))


@pytest.mark.parametrize("shell", ["bash -lc", "bash -ic", "zsh -c", "zsh -lc"])
def test_shells_get_the_environment(laptop, shell):
    assert lines(laptop, f"env -i HOME=$HOME PATH=/usr/bin:/bin {shell} 'echo $GREETING; which pip'")[-2:] == [
        "hello",
        "/home/maria/.tpuswarm/venv/bin/pip",
    ]


def test_pip_installs_into_the_environment_of_programs(laptop):
    lines(laptop, "pip install --no-index --find-links /srv/wheels simplejson")
    assert lines(laptop, "python -c 'import simplejson; print(simplejson.__file__)'")[0].startswith(
        "/home/maria/.tpuswarm/venv/"
    )


def test_set_up_leaves_nothing_in_the_home(laptop):
    """A failed download left an empty uv.sh there."""
    assert lines(laptop, "ls ~") == []


def test_command_with_sudo_ends_at_its_time_limit(laptop):
    laptop.run("exec", MACHINE, "--time-out", "3s", "--", "sudo", "sleep", "1111", rc=1)
    assert not laptop.machines_with("sleep 1111")


def test_command_with_sudo_ends_with_ctrl_c(laptop):
    command = laptop.start("exec", MACHINE, "--", "sudo", "sleep", "1112")
    until(lambda: laptop.machines_with("sleep 1112"))
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=120)
    assert not laptop.machines_with("sleep 1112")


def test_job_with_sudo_ends_when_it_is_stopped(laptop):
    laptop.run("exec", MACHINE, "--detach", "--name", "root", "--", "sudo sleep 1113")
    until(lambda: laptop.machines_with("sleep 1113"))
    assert "stopped" in laptop.run("stop", "root")
    assert not laptop.machines_with("sleep 1113")


def test_orphan_of_sudo_ends_with_its_job(laptop):
    """Its session, process group and environment are not its job's."""
    laptop.run("exec", MACHINE, "--detach", "--name", "orphan", "--", "sudo setsid --fork sleep 1114; sleep 1115")
    until(lambda: laptop.machines_with("sleep 1114"))
    laptop.run("stop", "orphan")
    assert not laptop.machines_with("sleep 1114") and not laptop.machines_with("sleep 1115")


def test_orphan_of_sudo_ends_with_its_job_after_the_supervisor_was_killed(laptop):
    command = "sudo setsid --fork sleep 1116; sleep 1117"
    laptop.run("exec", MACHINE, "--detach", "--name", "left", "--", command)
    until(lambda: laptop.machines_with("sleep 1116"))
    lines(laptop, "pkill -KILL -f 'supervise-.*start [l]eft'")
    laptop.run("stop", "left")
    assert not laptop.machines_with("sleep 1116") and not laptop.machines_with("sleep 1117")


def test_job_that_prints_much_is_not_held_up(laptop):
    """Its output goes through the supervisor; a file has none."""
    lines(laptop, "printf 'time -p head -c 60000000 /dev/zero\n' >print.sh; printf 'time -p head -c 60000000 /dev/zero"
                  " | cat >copy; rm copy\n' >write.sh")  # fmt: skip
    laptop.run("exec", MACHINE, "--detach", "--name", "much", "--", "bash print.sh 2>took; touch done")
    until(lambda: lines(laptop, "ls done 2>/dev/null || true"))
    printed, written = (
        float(re.search(r"real ([\d.]+)", "\n".join(lines(laptop, command)))[1])
        for command in ("cat took", "bash write.sh 2>&1")
    )
    assert printed < 20 * (written + 0.1)


def test_set_up_says_why_another_python_cannot_be_had(laptop):
    """The machine has no internet, and this computer has neither that Python nor internet."""
    laptop.change_file('python = "3.11"', 'python = "3.12"')
    try:
        shown = laptop.run("setup", rc=1)
    finally:
        laptop.change_file('python = "3.12"', 'python = "3.11"')
    assert "sending a file" in shown
    assert re.search(r"Python cannot be downloaded here either: .*failed to lookup address information", shown)
    assert "is set up" in laptop.run("setup")


def test_jobs_survive_the_end_of_their_session_in_units_of_their_own(laptop):
    """logind may end all processes of a user who has logged out; systemd may end a unit that has run out of memory."""
    lines(laptop, "sudo mkdir -p /etc/systemd/logind.conf.d; printf '[Login]\\nKillUserProcesses=yes\\n' | "
                  "sudo tee /etc/systemd/logind.conf.d/kill.conf; sudo systemctl restart systemd-logind")  # fmt: skip
    for name, command in (("stays", "sleep 1118"), ("other", "sleep 1124")):
        laptop.run("exec", MACHINE, "--detach", "--name", name, "--", command)
        until(lambda command=command: laptop.machines_with(command))
    assert len(set(lines(laptop, "grep -h ^0: $(pgrep -xf 'sleep 11(18|24)' | sed 's|.*|/proc/&/cgroup|')"))) == 2
    sessions = lines(laptop, "loginctl list-sessions --no-legend")
    laptop.run("ssh", MACHINE, "--", "true")
    until(lambda: not set(sessions) & set(lines(laptop, "loginctl list-sessions --no-legend")))
    for name, command in (("stays", "sleep 1118"), ("other", "sleep 1124")):
        assert laptop.machines_with(command)
        laptop.run("stop", name)


def test_files_of_jobs_are_for_their_user_only(laptop):
    laptop.run("exec", MACHINE, "--detach", "--name", "secret", "--", "echo s3cret; sleep 1119")
    assert lines(laptop, "sudo chmod 755 /home/maria; grep -rl s3cret .tpuswarm | head -1")
    assert lines(laptop, "sudo -u nobody grep -rl s3cret /home/maria/.tpuswarm 2>/dev/null | head -1") == []
    laptop.run("stop", "secret")


def test_job_of_another_user_with_the_same_name_goes_on(laptop):
    lines(laptop, "sudo useradd --create-home --groups google-sudoers bob; sudo cp .tpuswarm/supervise-*.py /tmp")
    lines(laptop, """echo '{"line": "sleep 1126"}' | sudo -iu bob python3 /tmp/supervise-*.py start same 1""")
    laptop.run("exec", MACHINE, "--detach", "--name", "same", "--", "sleep 1127")
    until(lambda: laptop.machines_with("sleep 1126") and laptop.machines_with("sleep 1127"))
    laptop.run("stop", "same")
    assert laptop.machines_with("sleep 1126") and not laptop.machines_with("sleep 1127")
    lines(laptop, "sudo -iu bob python3 /tmp/supervise-*.py end same 1")


def test_files_arrive_where_shells_print_as_they_start(laptop):
    lines(laptop, "sed -i '1a echo Welcome' ~/.bashrc ~/.profile; echo 'echo Welcome' >>~/.zshenv")
    (laptop.project / "train.py").write_text("print('learned')\n")
    laptop.run("copy", "train.py", f"{MACHINE}:copied.py")
    laptop.run("copy", f"{MACHINE}:copied.py", "back.py")
    assert (laptop.project / "back.py").read_text() == "print('learned')\n"
    laptop.run("sync", MACHINE, "--yes")
    lines(laptop, "sed -i '/Welcome/d' ~/.bashrc ~/.profile ~/.zshenv")
    assert lines(laptop, "python train.py && python ~/copied.py") == ["learned", "learned"]


def test_set_up_continues_after_a_power_cut_within_dpkg(laptop):
    laptop.change_file('apt = ["jq"]', 'apt = ["jq", "slow"]')
    lines(laptop, "sudo touch /slow")
    setting_up = laptop.start("setup")
    until(lambda: laptop.machines_with("sleep 1120"))
    lines(laptop, "sudo rm /slow; sync")
    laptop.run("rehearsal", "maintenance", MACHINE)
    setting_up.kill()
    setting_up.communicate()
    until(lambda: laptop.start("exec", MACHINE, "--", "true").wait() == 0)
    assert f"{MACHINE}/0 is set up" in laptop.run("setup")
    assert lines(laptop, "dpkg --audit") == []


def test_set_up_goes_on_with_one_broken_repository(laptop):
    lines(laptop, "echo 'deb [trusted=yes] file:/nowhere ./' | sudo tee /etc/apt/sources.list.d/broken.list")
    lines(laptop, "sudo dpkg --purge jq")
    laptop.change_file('apt = ["jq", "slow"]', 'apt = ["slow", "jq"]')
    shown = laptop.run("setup")
    assert "apt-get update failed" in shown and f"{MACHINE}/0 is set up" in shown
    assert lines(laptop, "jq --version; sudo rm /etc/apt/sources.list.d/broken.list") == ["jq-1.6"]
