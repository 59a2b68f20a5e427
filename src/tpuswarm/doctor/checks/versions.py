"""Versions in which hosts differ."""

from collections import Counter
from collections.abc import Iterator

from tpuswarm.doctor.check import AcrossCheck, Subject, Wrong

MEND = "set them up alike: `tpuswarm setup --on WHERE`"


def probe(hosts: list[Subject]) -> Iterator[tuple[str, Wrong]]:
    """Those that differ from what most have."""
    packages = {name for host in hosts for name in host.facts["packages"]}
    for name in sorted(packages):
        having = [(host, host.facts["packages"].get(name)) for host in hosts if host.facts["packages"]]
        usual = Counter(version for _, version in having).most_common(1)[0][0]
        for host, version in having:
            if version != usual:
                has, most = version or f"no {name}", usual or "none"
                yield (
                    host.label,
                    Wrong(f"{name} is {has} here, and {most} on most hosts", f"`tpuswarm setup --on {host.label}`"),
                )


CHECK = AcrossCheck(
    "versions", "packages that set-up has installed, and its Python",
    "hosts of one program that differ in jax or libtpu hang at the start or compute other numbers", MEND, probe,
)  # fmt: skip
