"""A libtpu that is not the one its jax was made for."""

from collections.abc import Iterator

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from tpuswarm.doctor.check import Check, Subject, Wrong

MEND = "`tpuswarm setup --on NAME`, or `pip install 'jax[tpu]'` in the environment of the program"


def probe(host: Subject) -> Iterator[Wrong]:
    """What is installed against what jax's own metadata asks for."""
    packages, wanted = host.facts["packages"], host.facts["wanted_libtpu"]
    if not wanted or "libtpu" not in packages:
        return
    try:
        fits = SpecifierSet(wanted).contains(packages["libtpu"], prereleases=True)
    except InvalidSpecifier:  # of a jax that is newer than we know
        return
    if not fits:
        jax = packages.get("jax", "of an unknown version")
        yield Wrong(f"libtpu is {packages['libtpu']}, and jax {jax} asks for libtpu{wanted}", MEND)


CHECK = Check(
    "libtpu", "the metadata of the jax that set-up has installed",
    "a program ends as it starts, or in an error of the compiler that nobody can read", MEND, probe,
)  # fmt: skip
