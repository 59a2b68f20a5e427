"""Firewall rules: the two that a fleet needs, and those that let strangers in. Values in, values out.

Ray's and JAX's processes listen on all addresses of a machine and do what they are told, so every port must be open
among the fleet's own machines and shut to all others. Since 0.8.1 JAX uses port 8482, and libtpu 8490, which the rule
that Google makes for v6e by itself leaves shut: that is why a rule names no ports.
"""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

HARMLESS = {"22", "3389"}
"""TCP ports that strangers may reach: SSH asks for a key, and nothing of ours listens where Windows' desktops do."""
ANYWHERE = "0.0.0.0/0"


class Rule(NamedTuple):
    """A rule that allows connections into a network, and is on."""

    name: str
    network: str
    allowed: tuple[tuple[str, tuple[str, ...]], ...]
    """Protocols (tcp, …, all) and their ports; none: every port."""
    ranges: tuple[str, ...] = ()
    source_tags: tuple[str, ...] = ()
    target_tags: tuple[str, ...] = ()
    """None: every machine of the network."""
    accounts: tuple[str, ...] = ()
    """Service accounts that it lets in."""
    target_accounts: tuple[str, ...] = ()
    description: str = ""

    def reaches(self, tags: Iterable[str]) -> bool:
        """Whether machines with `tags` are among its targets. Those of a service account may be ours."""
        return not self.target_tags or not set(self.target_tags).isdisjoint(tags)

    @property
    def strange_ports(self) -> str | None:
        """The TCP ports that it opens, as a person says it, without the harmless ones; None: none."""
        for protocol, ports in self.allowed:
            if protocol in ("all", "tcp", "6") and (not ports or not HARMLESS.issuperset(ports)):
                return "every port" if not ports else f"TCP port {', '.join(p for p in ports if p not in HARMLESS)}"
        return None

    def gcloud(self, project: str) -> str:
        """The command that makes it."""
        allow = ",".join(
            each for protocol, ports in self.allowed for each in ([f"{protocol}:{p}" for p in ports] or [protocol])
        )
        words = ["gcloud", "compute", "firewall-rules", "create", self.name, f"--project={project}"]
        words += [f"--network={self.network}", f"--allow={allow}"]
        words += [f"--source-ranges={','.join(self.ranges)}"] if self.ranges else []
        words += [f"--source-tags={','.join(self.source_tags)}"] if self.source_tags else []
        words += [f"--target-tags={','.join(self.target_tags)}", f"--description={self.description}"]
        return shlex.join(words)


def tag_of(fleet: str) -> str:
    """The tag by which the firewall knows the machines of the fleet of that name."""
    return f"tpuswarm-{fleet}"


def wanted(network: str, tag: str, description: str) -> tuple[Rule, Rule]:
    """The rules of a fleet whose machines have the tag `tag`: all TCP among them, and SSH from everywhere."""
    inside = Rule(f"{tag}-inside", network, (("tcp", ()),), (), (tag,), (tag,), description=description)
    ssh = Rule(f"{tag}-ssh", network, (("tcp", ("22",)),), (ANYWHERE,), (), (tag,), description=description)
    return inside, ssh


def joins(rules: Iterable[Rule], network: str, tags: Iterable[str]) -> bool:
    """Whether a rule opens every TCP port among machines with `tags`."""
    own = set(tags)
    return any(
        rule.network == network
        and rule.reaches(own)
        and not rule.target_accounts
        and (not own.isdisjoint(rule.source_tags) or ANYWHERE in rule.ranges)
        and any(protocol in ("all", "tcp", "6") and not ports for protocol, ports in rule.allowed)
        for rule in rules
    )


def opens_ssh(rules: Iterable[Rule], network: str, tags: Iterable[str]) -> bool:
    """Whether a rule opens SSH's port on machines with `tags` to everybody."""
    own = set(tags)
    return any(
        rule.network == network
        and rule.reaches(own)
        and not rule.target_accounts
        and ANYWHERE in rule.ranges
        and any(protocol in ("all", "tcp", "6") and (not ports or "22" in ports) for protocol, ports in rule.allowed)
        for rule in rules
    )


def lets_strangers_in(rules: Iterable[Rule], network: str, tags: Iterable[str]) -> list[tuple[Rule, str]]:
    """Rules by which others than machines with `tags` reach those, each with a sentence that says who and where."""
    own = set(tags)
    found = []
    for rule in rules:
        strangers = [*rule.ranges, *rule.accounts, *(f"tag {tag}" for tag in rule.source_tags if tag not in own)]
        if rule.network == network and rule.reaches(own) and strangers and rule.strange_ports:
            found.append((rule, f"firewall rule {rule.name} lets {', '.join(strangers)} in to {rule.strange_ports}"))
    return found


def of_firewall(firewall: Mapping[str, Any]) -> Rule | None:
    """A firewall rule as REST writes it; None for one that is off, denies, or is for what goes out."""
    if firewall.get("disabled") or firewall.get("direction", "INGRESS") != "INGRESS" or not firewall.get("allowed"):
        return None

    def names(key: str) -> tuple[str, ...]:
        return tuple(firewall.get(key, ()))

    return Rule(
        name=firewall["name"],
        network=firewall["network"].rsplit("/", 1)[-1],
        allowed=tuple((each["IPProtocol"], tuple(each.get("ports", ()))) for each in firewall["allowed"]),
        ranges=names("sourceRanges"),
        source_tags=names("sourceTags"),
        target_tags=names("targetTags"),
        accounts=names("sourceServiceAccounts"),
        target_accounts=names("targetServiceAccounts"),
        description=firewall.get("description", ""),
    )
