"""The local cloud's hosts as containers with systemd, each with its own disk, network, users and processes."""

import asyncio
import os
import shutil
import signal
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from tpuswarm.cloud.google.firewall import ANYWHERE, rule_from_firewall
from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost
from tpuswarm.cloud.rehearsal.connect import CloudFolder
from tpuswarm.cloud.rehearsal.machines.metadata import MetadataServer
from tpuswarm.cloud.rehearsal.machines.root import SSH_PORT
from tpuswarm.cloud.rehearsal.wire.http import HttpServer

NETWORK = "10.78"
SERVER = f"{NETWORK}.0.1"
"""Leads machines to the server's loopback."""
TEMPLATE, FILES = "TPUSWARM_REAL_TEMPLATE", "TPUSWARM_REAL_FILES"
"""Variables with the folder of a fresh machine's disk, and with one that machines have as /srv."""
UV_CACHE = "/var/cache/uv"
PYTHON_CACHE = f"{UV_CACHE}/compiled"
"""All machines have the same packages at the same paths: one of them compiles a module."""
REBOOT = 133
"""The exit code of systemd-nspawn when its machine reboots."""
TREES = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""Where control groups of version 2 may be."""
GROUP = "TPUSWARM_REAL_GROUP"
"""Names the control group of this cloud's processes."""
IN_GROUP = (
    *("sh", "-euc"),
    """\
for tree in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
  if [ -e $tree/cgroup.procs ] && mkdir -p $tree/$0; then echo $$ >$tree/$0/cgroup.procs; fi
done
exec "$@"
""",
)
"""The prefix of a control group's name and a command that runs in it; a container needs one of its own."""
CONTAINER = (
    *("systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--resolv-conf=off", "--timezone=off"),
    # Without a time namespace, a container with CAP_SYS_TIME sets this computer's clock.
    *("--capability=all", "--drop-capability=CAP_SYS_TIME", "--system-call-filter=@swap @reboot keyctl @mount"),
    "--console=pipe",
)
CONTAINER_VARIABLES = {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}


class RealMachines:
    """A backend of Machines; runs in a network and mount namespace of its own, as root."""

    def __init__(self, folder: CloudFolder, cloud: Cloud, http: HttpServer, storage: str):
        self._folder, self._cloud, self._http, self._storage = folder, cloud, http, storage
        self._disks = folder.path.with_name("disks")
        self._disks.mkdir(exist_ok=True)
        self._metadata: dict[str, asyncio.Server] = {}
        self._running: dict[str, tuple[asyncio.subprocess.Process, asyncio.Task[None]]] = {}

    def list_ids(self) -> set[str]:
        return {path.name for path in self._disks.iterdir()}

    async def run(self, host: RehearsedHost) -> None:
        if host.id not in self._metadata:
            get_host = partial(self._cloud.hosts.get, host.id)
            token = f"{self._folder.token()}~{host.id}"
            app = MetadataServer(get_host, self._cloud.facts, token, self._cloud.guests, dict, lambda request: True)
            self._metadata[host.id] = await self._http.listen("127.0.0.1", 0, app)
        disk = self._disks / host.id
        if not disk.exists():
            await self._make_disk(host, disk)
        await self._connect(host)
        boot = disk / "boot"
        if host.id in self._running and boot.read_text() != str(host.boot):
            await self._stop(host.id)
        if host.id not in self._running:
            boot.write_text(str(host.boot))
            process = await self._boot(host)
            self._running[host.id] = process, asyncio.create_task(self._keep(host, process))

    async def give_notice(self, host_id: str) -> None:
        if leader := self._leader(host_id):
            os.kill(leader, signal.SIGRTMIN + 4)  # asks systemd to power off

    async def end(self, *host_ids: str) -> None:
        for host_id in host_ids:
            await self._stop(host_id)
            if server := self._metadata.pop(host_id, None):
                server.close()

    async def delete(self, host_id: str) -> None:
        await self.end(host_id)
        disk = self._disks / host_id
        if disk.exists():
            await _run("umount", disk / "root")
            await _run("ip", "netns", "delete", (disk / "namespace").read_text())
            await asyncio.to_thread(shutil.rmtree, disk)

    async def shut_down(self, hosts: Collection[RehearsedHost]) -> None:
        await self.end(*(host.id for host in hosts))

    async def _make_disk(self, host: RehearsedHost, disk: Path) -> None:
        root = disk / "root"
        for name in ("root", "new", "work"):
            (disk / name).mkdir(parents=True)
        options = f"lowerdir={os.environ[TEMPLATE]},upperdir={disk}/new,workdir={disk}/work"
        await _run("mount", "-t", "overlay", "overlay", "-o", options, root)
        (root / "etc/hostname").write_text(f"{host.id}\n")
        (root / "etc/hosts").write_text(
            f"127.0.0.1 localhost\n{host.internal} {host.id}\n169.254.169.254 metadata.google.internal metadata\n"
        )
        variables = {
            "STORAGE_EMULATOR_HOST": self._storage,
            "TPUSWARM_REHEARSAL": str(self._folder.path),
            "GCE_METADATA_HOST": "metadata.google.internal",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPYCACHEPREFIX": PYTHON_CACHE,
            "UV_HTTP_RETRIES": "0",
        }
        if host.devices:
            variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={host.devices}"
        (root / "etc/environment").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        for kind in ("system", "user"):
            folder = root / f"etc/systemd/{kind}.conf.d"
            folder.mkdir(parents=True, exist_ok=True)
            lines = (f'DefaultEnvironment="{name}={value}"\n' for name, value in variables.items())
            (folder / "environment.conf").write_text("[Manager]\n" + "".join(lines))

    async def _connect(self, host: RehearsedHost) -> None:
        """Give a host its network, and set what reaches which host."""
        name = _interface(host)
        file = self._disks / host.id / "namespace"
        if not file.exists():
            address = self._folder.read_address()
            assert address is not None
            await _run(
                "sh", "-euc", f"""\
ip netns add {name}
ip link add {name} type veth peer name host0 netns {name}
echo 1 >/proc/sys/net/ipv4/conf/{name}/route_localnet
ip link set {name} up
ip -n {name} link set lo up
ip -n {name} address add {host.internal}/32 dev host0
ip -n {name} link set host0 up
ip -n {name} route add default via {SERVER} dev host0 onlink
ip route replace {host.internal} dev {name}
nsenter --net=/run/netns/{name} sh -euc '
echo 1 >/proc/sys/net/ipv4/conf/all/route_localnet
nft -f -' <<END
table ip cloud {{
  chain output {{
    type nat hook output priority -100
    ip daddr 127.0.0.1 tcp dport {{ {address["rpc"]}, {address["http"]} }} dnat to {SERVER}
  }}
  chain postrouting {{
    type nat hook postrouting priority 100
    ip daddr {SERVER} masquerade
  }}
}}
END
""",
            )  # fmt: skip
            file.write_text(name)
        await _run("nft", "-f", "-", text=self._ruleset())

    def _ruleset(self) -> str:
        """Return the rules that Google's network would follow, for nft."""
        hosts = [(host, facts) for host in self._cloud.hosts.all() if (facts := self._cloud.facts(host))]
        resources = self._cloud.resources.table.values()
        firewalls = [resource for resource in resources if resource["kind"] == "compute#firewall"]
        rules = [rule for firewall in firewalls if (rule := rule_from_firewall(firewall))]
        nat, outgoing, admitted = [f"ip daddr {SERVER} dnat to 127.0.0.1"], [], []
        for host, facts in hosts:
            if server := self._metadata.get(host.id):
                port = server.sockets[0].getsockname()[1]
                nat.append(f"ip saddr {host.internal} ip daddr 169.254.169.254 tcp dport 80 dnat to 127.0.0.1:{port}")
            if host.external:
                nat.append(f"ip daddr {host.external} dnat to {host.internal}")
                outgoing.append(f"ip daddr {host.external} dnat to {host.internal}")
            for rule in rules:
                if not rule.reaches(facts.tags):
                    continue
                sources = set(rule.ranges) | {
                    other.internal for other, about in hosts if not set(rule.source_tags).isdisjoint(about.tags)
                }
                for protocol, ports in rule.allowed:
                    if protocol != "tcp" or not sources:
                        continue
                    wanted = {*ports, *([str(SSH_PORT)] if "22" in ports else [])}  # the port of SSH in the local cloud
                    from_where = "" if ANYWHERE in sources else f"ip saddr {{ {', '.join(sorted(sources))} }} "
                    where = f"tcp dport {{ {', '.join(sorted(wanted))} }}" if wanted else "meta l4proto tcp"
                    admitted.append(f"{from_where}ip daddr {host.internal} {where} accept")
        chains = {
            "prerouting": ["type nat hook prerouting priority -100", *nat],
            "outgoing": ["type nat hook output priority -100", *outgoing],
            "admitted": ["ct state established,related accept", "ip protocol icmp accept", *admitted, "drop"],
            "forward": ["type filter hook forward priority 0", "jump admitted"],
            "local": ["type filter hook output priority 0", 'oifname "m*" jump admitted'],
        }
        text = "".join(f"chain {name} {{\n" + "\n".join(lines) + "\n}\n" for name, lines in chains.items())
        return f"table ip cloud\ndelete table ip cloud\ntable ip cloud {{\n{text}}}\n"

    async def _boot(self, host: RehearsedHost) -> asyncio.subprocess.Process:
        disk = self._disks / host.id
        words = [
            *("setpriv", "--pdeathsig", "KILL", *CONTAINER, f"--machine={_interface(host)}"),
            *(f"--directory={disk}/root", "--hostname=" + host.id[:60]),
            *(f"--network-namespace-path=/run/netns/{_interface(host)}", f"--bind={self._folder.path}"),
            *(f"--bind={os.environ[FILES]}:/srv", f"--bind={os.environ[FILES]}/uv-cache:{UV_CACHE}"),
        ]
        with (disk / "console").open("ab") as console:
            return await asyncio.create_subprocess_exec(
                *(*IN_GROUP, f"{os.environ[GROUP]}/{host.id}", *words),
                stdin=asyncio.subprocess.DEVNULL, stdout=console, stderr=console,
                env={**os.environ, **CONTAINER_VARIABLES},
            )  # fmt: skip

    async def _keep(self, host: RehearsedHost, process: asyncio.subprocess.Process) -> None:
        """Boot a machine again when it reboots."""
        while await process.wait() == REBOOT:
            process = await self._boot(host)
            self._running[host.id] = process, self._running[host.id][1]

    async def _stop(self, host_id: str) -> None:
        """Cut a machine's power."""
        if host_id in self._running:
            process, keeping = self._running.pop(host_id)
            keeping.cancel()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            for tree in TREES:
                with suppress(OSError):
                    (tree / os.environ[GROUP] / host_id / "cgroup.kill").write_text("1")

    def _leader(self, host_id: str) -> int | None:
        """Return the process that is the machine's systemd."""
        if host_id not in self._running:
            return None
        pid = self._running[host_id][0].pid
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return children[0] if children else None


def _interface(host: RehearsedHost) -> str:
    """Return the name of a host's network; a host may have the address of one that is being deleted."""
    return f"m{host.id.rpartition('-')[2]}"


async def _run(*words: str | Path, text: str | None = None) -> None:
    process = await asyncio.create_subprocess_exec(
        *map(str, words), stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, error = await process.communicate((text or "").encode())
    if process.returncode != 0:
        raise OSError(f"{' '.join(map(str, words))}: {error.decode()}\n{text or ''}")
