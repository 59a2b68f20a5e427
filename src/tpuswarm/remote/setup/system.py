"""Steps for the machine itself: time zone, open files, swap, a data disk, Debian packages, NFS, kernel settings."""

import shlex
from collections.abc import Iterable, Iterator, Sequence

from tpuswarm.remote.paths import STATE_FOLDER
from tpuswarm.remote.setup.step import FOLDER, Step
from tpuswarm.remote.setup.table import Nfs, Setup

EXPORTS, EXPORT_OPTIONS = "/etc/exports.d/tpuswarm.exports", "rw,async,no_subtree_check"
NFS_SERVER, NFS_CLIENTS = "nfs-server", "nfs-clients"
SYSCTL, SYSCTL_SOURCE = "/etc/sysctl.d/60-tpuswarm.conf", f"{STATE_FOLDER}/router/sysctl"

FSTAB = """\
note_mount() {
  sudo touch /etc/fstab
  sudo cat /etc/fstab | grep -qxF -- "$1" || echo "$1" | sudo tee -a /etc/fstab >/dev/null
}
"""
APT = """\
said=$(mktemp); trap 'rm -f "$said"' EXIT
apt() {
  for try in $(seq 300); do
    if sudo DEBIAN_FRONTEND=noninteractive apt-get -q "$@" >"$said" 2>&1; then cat "$said"; return 0; fi
    if ! grep -Eq "Could not get lock|Unable to (lock|acquire)" "$said"; then cat "$said"; return 1; fi
    if [ $try = 1 ]; then echo "apt is busy there, waiting: $(grep -Eo 'held by process.*' "$said" | head -n 1)" >&3; fi
    sleep 2
  done
  cat "$said"; return 1
}
apt_install() {
  apt update || echo "note: apt-get update failed: $(grep -m 1 '^E:' "$said")" >&3
  # The machine may have gone down in the middle of an installation.
  sudo DEBIAN_FRONTEND=noninteractive dpkg --force-confdef --force-confold --configure -a || true
  apt install -y "$@"
}
"""
"""A machine that has just started updates itself, so wait up to ten minutes for apt's lock."""


def system(table: Setup, has_disk: bool, swap_gb: int) -> Iterator[Step]:
    """Yield the steps of the table. `has_disk`: a data disk is attached."""
    if table.timezone:
        yield Step(
            "timezone",
            f"sudo timedatectl set-timezone {table.timezone}",
            f"timedatectl | grep -Eq 'Time zone: {table.timezone}( |$)'",
        )
    if table.nofile:
        yield _nofile(table.nofile)
    if swap_gb:
        yield _swap(swap_gb)
    if table.data_disk and has_disk:
        yield _disk(table.data_disk)
    if table.apt:
        yield Step("apt", f"{APT}apt_install {shlex.join(table.apt)}")


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
    at = f"{FOLDER}/data-disk.at"  # where set-up has mounted it
    return Step(
        "data-disk",
        f"""\
{FSTAB}
if [ -s {at} ]; then
  sudo umount "$(cat {at})" 2>/dev/null || true
  sudo sed -i "\\| $(cat {at}) ext4 |d" /etc/fstab
fi
disk=
for name in $(lsblk -dnpo NAME,TYPE | awk '$2 == "disk" {{print $1}}'); do
  if [ -z "$(lsblk -nro MOUNTPOINT "$name" | tr -d '[:space:]')" ]; then disk=$name; break; fi
done
if [ -z "$disk" ]; then echo "no unmounted data disk is attached"; exit 1; fi
options=defaults
if [ "$(lsblk -dnro RO "$disk" | tr -d '[:space:]')" = 1 ]; then options=ro,noload
else
  found=0
  sudo blkid "$disk" >/dev/null || found=$?
  if [ $found = 2 ]; then  # blkid finds no file system; make sure that nothing else is there
    if [ -n "$(sudo wipefs --no-act --noheadings "$disk")" ]; then
      echo "$disk has no file system but other data: see 'sudo wipefs $disk'"; exit 1
    fi
    sudo mkfs.ext4 -q -m 0 "$disk"
  elif [ $found != 0 ]; then echo "cannot read $disk (blkid: exit $found)"; exit 1; fi
fi
sudo mkdir -p {folder}
sudo mount -o $options "$disk" {folder}
if [ $options = defaults ]; then sudo chown "$(id -un)" {folder}; fi
echo {folder} >{at}
uuid=$(sudo blkid -s UUID -o value "$disk" || true)  # device names change at a reboot
note_mount "${{uuid:+UUID=}}${{uuid:-$disk}} {folder} ext4 $options,nofail 0 2\"""",
        f"mount | grep -Eq ' on {folder}( |$)'",
    )


def nfs(table: Nfs, address: str | None, clients: Sequence[str]) -> Iterator[Step]:
    """Yield the steps of the server (`address` is None), or of a machine that mounts from this internal address.

    clients: internal addresses that may mount; other users of the network may not.
    """
    if address is None:
        yield Step(
            NFS_SERVER,
            f"""\
{APT}apt_install nfs-kernel-server
sudo mkdir -p {table.path} /etc/exports.d
sudo chmod 1777 {table.path}
sudo tee {EXPORTS} </dev/null
sudo systemctl enable --now nfs-kernel-server""",
            "systemctl is-active --quiet nfs-kernel-server",
        )
        # Appended, not rewritten: set-ups that run at once may have seen different machines.
        yield Step(
            NFS_CLIENTS,
            f"""\
for client in {" ".join(clients)}; do
  sudo grep -qsF " $client(" {EXPORTS} ||
    echo "{table.path} $client({EXPORT_OPTIONS})" | sudo tee -a {EXPORTS} >/dev/null
done
sudo exportfs -ra""",
            f'for client in {" ".join(clients)}; do sudo grep -qsF " $client(" {EXPORTS} || exit 1; done',
        )
        return
    yield Step(
        "nfs",
        f"""\
{APT}apt_install nfs-common
{FSTAB}
sudo umount -l {table.mount} 2>/dev/null || true
sudo sed -i '\\| {table.mount} nfs |d' /etc/fstab 2>/dev/null || true
sudo mkdir -p {table.mount}
sudo mount -t nfs -o hard,nofail {address}:{table.path} {table.mount}
note_mount "{address}:{table.path} {table.mount} nfs hard,nofail,_netdev 0 0\"""",
        f"mount | grep -Eq '^{address}:{table.path} on {table.mount}( |$)' && timeout 10 sudo stat -t {table.mount}",
        waits_for=NFS_CLIENTS,
    )


def network(settings: Iterable[tuple[str, str]]) -> Step:
    """Return the step that sets kernel settings (names in /proc/sys, values) on a machine behind a router."""
    lines = "".join(f"{name} = {value}\n" for name, value in settings)
    return Step(
        "network",
        f"""\
sudo mkdir -p /etc/sysctl.d
sudo tee {SYSCTL} <{SYSCTL_SOURCE} >/dev/null
sudo sysctl --quiet -p {SYSCTL}""",
        f"sudo test -e {SYSCTL}",
        {SYSCTL_SOURCE: lines},
    )
