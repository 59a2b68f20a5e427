"""A bucket that a host cannot write to."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

WRITING = ("cloud-platform", "devstorage.read_write", "devstorage.full_control")
"""Access scopes with which a machine may write to buckets
(cloud.google.com/compute/docs/access/service-accounts#scopes_best_practice).
"""
MEND = (
    "`tpuswarm doctor cloud` looks at the bucket itself; the machines' service account needs the role "
    "roles/storage.objectAdmin there"
)
AGAIN = "a machine keeps the scopes it was created with: `tpuswarm down NAME`, and its pool makes it again"


def probe(host: Subject) -> Iterator[Wrong]:
    """The machine's access scopes, and what the bucket says that it may do."""
    bucket = host.facts["bucket"]
    if bucket is None:
        return
    scopes = (host.facts["metadata"] or {}).get("scopes")
    if scopes and not any(each.endswith(f"/auth/{name}") for each in scopes.split() for name in WRITING):
        yield Wrong(f"its access scopes let it write to no bucket: {' '.join(scopes.split())}", AGAIN)
    elif bucket["why"]:
        yield Wrong(f"gs://{bucket['name']} does not answer from here: {bucket['why']}", MEND)
    elif bucket["lacks"]:
        yield Wrong(f"in gs://{bucket['name']} it may not do {', '.join(bucket['lacks'])}", MEND)


CHECK = Check(
    "bucket", "its access scopes, and what the fleet's bucket lets it do",
    "checkpoints and commits are lost with the machine where they cannot be stored", MEND, probe,
)  # fmt: skip
