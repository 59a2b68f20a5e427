"""What `tpuswarm demo --cloud` counts as shown."""

from tpuswarm.cli.demo.demo_cloud import commit_epoch
from tpuswarm.train.run.directory import append_event


def test_new_head_counts_once_it_has_committed(tmp_path):
    assert commit_epoch(tmp_path) == 0
    for version in (1, 2):
        append_event(tmp_path, "commit", version=version, epoch=1)
    append_event(tmp_path, "started", message="commit by another head")
    append_event(tmp_path, "coordinator", name="coordinator", message="leads", epoch=2)
    assert commit_epoch(tmp_path) == 1
    append_event(tmp_path, "commit", version=3, epoch=2)
    assert commit_epoch(tmp_path) == 2
