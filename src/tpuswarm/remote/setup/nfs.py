"""Steps for a folder of one machine on all."""

from collections.abc import Iterator, Sequence

from tpuswarm.remote.setup.step import Step
from tpuswarm.remote.setup.system import APT, FSTAB
from tpuswarm.remote.setup.table import Nfs

EXPORTS, HOW = "/etc/exports.d/tpuswarm.exports", "rw,async,no_subtree_check"
SERVER, CLIENTS, CLIENT = "nfs-server", "nfs-clients", "nfs"


def nfs(table: Nfs, address: str | None, clients: Sequence[str]) -> Iterator[Step]:
    """Of the server itself (`address` is None), or of a machine that reaches it at its internal address.

    clients: internal addresses of those that may mount it: of a network that others use too, nobody else may.
    """
    if address is None:
        yield Step(
            SERVER,
            f"""\
{APT}apt update; apt install -y nfs-kernel-server
sudo mkdir -p {table.path} /etc/exports.d
sudo chmod 1777 {table.path}
sudo tee {EXPORTS} </dev/null
sudo systemctl enable --now nfs-kernel-server""",
            "systemctl is-active --quiet nfs-kernel-server",
        )
        # Added and not written anew: several who set machines up at once have looked at the fleet at different times.
        yield Step(
            CLIENTS,
            f"""\
for each in {" ".join(clients)}; do
  sudo grep -qsF " $each(" {EXPORTS} || echo "{table.path} $each({HOW})" | sudo tee -a {EXPORTS} >/dev/null
done
sudo exportfs -ra""",
            f'for each in {" ".join(clients)}; do sudo grep -qsF " $each(" {EXPORTS} || exit 1; done',
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
        waits_for=CLIENTS,
    )
