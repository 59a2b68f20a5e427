"""Steps for a folder of one machine on all."""

from collections.abc import Iterator

from tpuswarm.remote.setup.step import Step
from tpuswarm.remote.setup.system import APT, FSTAB
from tpuswarm.remote.setup.table import Nfs

INSIDE, HOW = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"), "rw,async,no_subtree_check"
"""Who may mount it: private addresses, which Google's firewall lets in from the own network alone."""
SERVER, CLIENT = "nfs-server", "nfs"


def nfs(table: Nfs, address: str | None) -> Iterator[Step]:
    """Of the server itself (`address` is None), or of a machine that reaches it at its internal address."""
    if address is None:
        yield Step(
            SERVER,
            f"""\
{APT}apt update; apt install -y nfs-kernel-server
sudo mkdir -p {table.path} /etc/exports.d
sudo chmod 1777 {table.path}
echo '{table.path} {" ".join(f"{each}({HOW})" for each in INSIDE)}' |
  sudo tee /etc/exports.d/tpuswarm.exports >/dev/null
sudo systemctl enable --now nfs-kernel-server
sudo exportfs -ra""",
            "systemctl is-active --quiet nfs-kernel-server",
        )
        return
    yield Step(
        CLIENT,
        f"""\
{APT}apt update; apt install -y nfs-common
{FSTAB}
sudo umount -l {table.mount} 2>/dev/null || true
sudo sed -i '\\| {table.mount} nfs |d' /etc/fstab 2>/dev/null || true
sudo mkdir -p {table.mount}
sudo mount -t nfs -o hard,nofail {address}:{table.path} {table.mount}
note_mount "{address}:{table.path} {table.mount} nfs hard,nofail,_netdev 0 0\"""",
        f"mount | grep -Eq '^{address}:{table.path} on {table.mount}( |$)' && timeout 10 sudo stat -t {table.mount}",
        waits_for=SERVER,
    )
