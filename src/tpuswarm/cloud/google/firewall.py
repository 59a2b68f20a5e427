"""Define a fleet's firewall rules, and find rules that admit strangers.

Ray's and JAX's processes listen on all addresses and execute what they receive, so every port must be open among the
fleet's machines and closed to all others. The rules name no ports, which change: JAX uses 8482 since 0.8.1.
"""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

HARMLESS_PORTS = {"22", "3389"}
"""TCP ports that strangers may reach: SSH needs a key, and nothing listens on the port of remote desktops."""
ANYWHERE = "0.0.0.0/0"
LISTEN_PORT = 8443
"""TCP port on which a fleet's head admits members from anywhere."""


class Rule(NamedTuple):
    """An enabled rule that allows connections into a network."""

    name: str
    network: str
    allowed: tuple[tuple[str, tuple[str, ...]], ...]
    """Protocols (tcp, …, all) and their ports; no ports means every port."""
    ranges: tuple[str, ...] = ()
    source_tags: tuple[str, ...] = ()
    target_tags: tuple[str, ...] = ()
    """Empty: every machine of the network."""
    accounts: tuple[str, ...] = ()
    """Source service accounts."""
    target_accounts: tuple[str, ...] = ()
    description: str = ""

    def reaches(self, tags: Iterable[str]) -> bool:
        """Return whether machines with `tags` are among its targets; a target account may match any machine."""
        return not self.target_tags or not set(self.target_tags).isdisjoint(tags)

    @property
    def strange_ports(self) -> str | None:
        """Open TCP ports without harmless ones, in words; None if there are none."""
        for protocol, ports in self.allowed:
            if protocol in ("all", "tcp", "6") and (not ports or not HARMLESS_PORTS.issuperset(ports)):
                return (
                    "every port" if not ports else f"TCP port {', '.join(p for p in ports if p not in HARMLESS_PORTS)}"
                )
        return None

    def gcloud(self, project: str) -> str:
        """Return the command that creates it."""
        allow = ",".join(
            entry for protocol, ports in self.allowed for entry in ([f"{protocol}:{p}" for p in ports] or [protocol])
        )
        words = ["gcloud", "compute", "firewall-rules", "create", self.name, f"--project={project}"]
        words += [f"--network={self.network}", f"--allow={allow}"]
        words += [f"--source-ranges={','.join(self.ranges)}"] if self.ranges else []
        words += [f"--source-tags={','.join(self.source_tags)}"] if self.source_tags else []
        words += [f"--target-tags={','.join(self.target_tags)}", f"--description={self.description}"]
        return shlex.join(words)


def network_tag(fleet: str) -> str:
    """Return the network tag of a fleet's machines."""
    return f"tpuswarm-{fleet}"


def head_tag(fleet: str) -> str:
    """Return the network tag of a fleet's head alone."""
    return f"head-{network_tag(fleet)}"  # no tag of another fleet


def listening_rule(fleet: str, network: str) -> Rule:
    """Return the rule that lets everybody reach the port of a fleet's head for members from anywhere."""
    ports, tags = (("tcp", (str(LISTEN_PORT),)),), (head_tag(fleet),)
    name = f"{network_tag(fleet)}-listen"
    return Rule(name, network, ports, (ANYWHERE,), (), tags, description=f"tpuswarm {fleet}")


def fleet_rules(network: str, tag: str, description: str) -> tuple[Rule, Rule]:
    """Return the rules of a fleet: all TCP among machines with `tag`, and SSH from everywhere."""
    inside = Rule(f"{tag}-inside", network, (("tcp", ()),), (), (tag,), (tag,), description=description)
    ssh = Rule(f"{tag}-ssh", network, (("tcp", ("22",)),), (ANYWHERE,), (), (tag,), description=description)
    return inside, ssh


def opens_all_ports(rules: Iterable[Rule], network: str, tags: Iterable[str]) -> bool:
    """Return whether a rule opens every TCP port among machines with `tags`."""
    own = set(tags)
    return any(
        rule.network == network
        and rule.reaches(own)
        and not rule.target_accounts
        and (not own.isdisjoint(rule.source_tags) or ANYWHERE in rule.ranges)
        and any(protocol in ("all", "tcp", "6") and not ports for protocol, ports in rule.allowed)
        for rule in rules
    )


def opens_port(rules: Iterable[Rule], network: str, tags: Iterable[str], port: int = 22) -> bool:
    """Return whether a rule opens a TCP port, by default SSH's, on machines with `tags` to everybody."""
    own = set(tags)
    return any(
        rule.network == network
        and rule.reaches(own)
        and not rule.target_accounts
        and ANYWHERE in rule.ranges
        and any(
            protocol in ("all", "tcp", "6") and (not ports or str(port) in ports) for protocol, ports in rule.allowed
        )
        for rule in rules
    )


def rules_open_to_strangers(rules: Iterable[Rule], network: str, tags: Iterable[str]) -> list[tuple[Rule, str]]:
    """Return the rules that let strangers reach machines with `tags`, each with a sentence."""
    own = set(tags)
    found = []
    for rule in rules:
        strangers = [*rule.ranges, *rule.accounts, *(f"tag {tag}" for tag in rule.source_tags if tag not in own)]
        if rule.network == network and rule.reaches(own) and strangers and rule.strange_ports:
            found.append((rule, f"firewall rule {rule.name} lets {', '.join(strangers)} in to {rule.strange_ports}"))
    return found


def rule_from_firewall(firewall: Mapping[str, Any]) -> Rule | None:
    """Read a rule from REST; None if it is disabled, denies, or is for outgoing traffic."""
    if firewall.get("disabled") or firewall.get("direction", "INGRESS") != "INGRESS" or not firewall.get("allowed"):
        return None

    def names(key: str) -> tuple[str, ...]:
        return tuple(firewall.get(key, ()))

    return Rule(
        name=firewall["name"],
        network=firewall["network"].rsplit("/", 1)[-1],
        allowed=tuple((entry["IPProtocol"], tuple(entry.get("ports", ()))) for entry in firewall["allowed"]),
        ranges=names("sourceRanges"),
        source_tags=names("sourceTags"),
        target_tags=names("targetTags"),
        accounts=names("sourceServiceAccounts"),
        target_accounts=names("targetServiceAccounts"),
        description=firewall.get("description", ""),
    )
