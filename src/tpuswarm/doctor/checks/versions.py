"""Versions in which hosts differ."""

from collections import Counter
from collections.abc import Iterator

from tpuswarm.doctor.check import AcrossCheck, Subject, Wrong

MEND = "set them up alike: `tpuswarm setup --on WHERE`"


def probe(hosts: list[Subject]) -> Iterator[tuple[str, Wrong]]:
    """Those that differ from what most have, or from the first one's."""
    hosts = [host for host in hosts if host.facts.get("packages")]  # the others: not set up, or not found out
    packages = {name for host in hosts for name in host.facts["packages"]}
    for name in sorted(packages):
        having = [(host, host.facts["packages"].get(name)) for host in hosts]
        usual, count = Counter(version for _, version in having).most_common(1)[0]
        alike = [host.label for host, version in having if version == usual]
        where = (
            "most hosts" if 2 * count > len(having) else ", ".join(alike[:3]) + f" and {count - 3} more" * (count > 3)
        )
        for host, version in having:
            if version != usual:
                has, there = version or f"no {name}", usual or "none"
                what = f"{name} is {has} here, and {there} on {where}"
                yield host.label, Wrong(what, f"`tpuswarm setup --on {host.label}`")


CHECK = AcrossCheck(
    "versions", "packages that set-up has installed, and its Python",
    "hosts of one program that differ in jax or libtpu hang at the start or compute other numbers", MEND, probe,
    "packages",
)  # fmt: skip
