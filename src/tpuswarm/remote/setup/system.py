"""Steps for the machine itself: time zone, open files, swap, a data disk, Debian packages."""

import shlex
from collections.abc import Iterator

from tpuswarm.remote.setup.step import FOLDER, Step
from tpuswarm.remote.setup.table import Setup

FSTAB = """\
note_mount() {
  sudo touch /etc/fstab
  sudo cat /etc/fstab | grep -qxF -- "$1" || echo "$1" | sudo tee -a /etc/fstab >/dev/null
}
"""
APT = """\
apt() {
  for try in $(seq 300); do
    if sudo DEBIAN_FRONTEND=noninteractive apt-get -q "$@" >said 2>&1; then cat said; return 0; fi
    if ! grep -Eq "Could not get lock|Unable to (lock|acquire)" said; then cat said; return 1; fi
    if [ $try = 1 ]; then echo "apt is busy there, waiting: $(grep -Eo 'held by process.*' said | head -n 1)" >&3; fi
    sleep 2
  done
  cat said; return 1
}
cd "$(mktemp -d)"
"""
"""A machine that has just started updates itself: apt's lock is waited for, ten minutes at most."""


def system(table: Setup, has_disk: bool) -> Iterator[Step]:
    """Those that the table asks for. `has_disk`: whether a data disk is attached."""
    if table.timezone:
        yield Step(
            "timezone",
            f"sudo timedatectl set-timezone {table.timezone}",
            f"timedatectl | grep -Eq 'Time zone: {table.timezone}( |$)'",
        )
    if table.nofile:
        yield _nofile(table.nofile)
    if table.swap_gb:
        yield _swap(table.swap_gb)
    if table.data_disk and has_disk:
        yield _disk(table.data_disk)
    if table.apt:
        yield Step("apt", f"{APT}apt update; apt install -y {shlex.join(table.apt)}")


def _nofile(count: int) -> Step:
    limits, systemd = "/etc/security/limits.d/tpuswarm.conf", "tpuswarm.conf"
    return Step(
        "nofile",
        f"""\
sudo mkdir -p /etc/security/limits.d /etc/systemd/system.conf.d /etc/systemd/user.conf.d
printf '%s\\n' '* soft nofile {count}' '* hard nofile {count}' | sudo tee {limits} >/dev/null
printf '[Manager]\\nDefaultLimitNOFILE={count}\\n' |
  sudo tee /etc/systemd/system.conf.d/{systemd} /etc/systemd/user.conf.d/{systemd} >/dev/null
sudo systemctl daemon-reload""",
        f"sudo grep -q 'hard nofile {count}$' {limits}",
    )


def _swap(gigabytes: int) -> Step:
    return Step(
        "swap",
        f"""\
{FSTAB}
sudo swapoff /swapfile 2>/dev/null || true
sudo rm -f /swapfile
free=$(df -k --output=avail / | tail -n 1)
if [ "$free" -lt {gigabytes * 1_000_000} ]; then
  echo "No space left on device: {gigabytes} GB of swap, $((free / 1000000)) GB free"; exit 1
fi
sudo fallocate -l {gigabytes}GB /swapfile
sudo chmod 600 /swapfile
sudo mkswap /swapfile
sudo swapon /swapfile
note_mount "/swapfile none swap sw 0 0\"""",
        "sudo swapon --show=NAME --noheadings | grep -qx /swapfile",
    )


def _disk(folder: str) -> Step:
    at = f"{FOLDER}/data-disk.at"  # where it was mounted before
    return Step(
        "data-disk",
        f"""\
{FSTAB}
if [ -s {at} ]; then
  sudo umount "$(cat {at})" 2>/dev/null || true
  sudo sed -i "\\| $(cat {at}) ext4 |d" /etc/fstab
fi
disk=
for each in $(lsblk -dnpo NAME,TYPE | awk '$2 == "disk" {{print $1}}'); do
  if [ -z "$(lsblk -nro MOUNTPOINT "$each" | tr -d '[:space:]')" ]; then disk=$each; break; fi
done
if [ -z "$disk" ]; then echo "no data disk without a mount is attached to it"; exit 1; fi
how=defaults
if [ "$(lsblk -dnro RO "$disk" | tr -d '[:space:]')" = 1 ]; then how=ro,noload
else
  found=0
  sudo blkid "$disk" >/dev/null || found=$?
  if [ $found = 2 ]; then  # it knows no file system there; anything else may be somebody's data
    if [ -n "$(sudo wipefs --no-act --noheadings "$disk")" ]; then
      echo "$disk has no file system, but marks of something: 'sudo wipefs $disk' shows them"; exit 1
    fi
    sudo mkfs.ext4 -q -m 0 "$disk"
  elif [ $found != 0 ]; then echo "what is on $disk cannot be told (blkid: exit $found)"; exit 1; fi
fi
sudo mkdir -p {folder}
sudo mount -o $how "$disk" {folder}
if [ $how = defaults ]; then sudo chown "$(id -un)" {folder}; fi
echo {folder} >{at}
uuid=$(sudo blkid -s UUID -o value "$disk" || true)  # after a reboot another disk may have this one's name
note_mount "${{uuid:+UUID=}}${{uuid:-$disk}} {folder} ext4 $how,nofail 0 2\"""",
        f"mount | grep -Eq ' on {folder}( |$)'",
    )
