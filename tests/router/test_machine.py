"""Writing of system files."""

import pytest

from tpuswarm.errors import RunFailed
from tpuswarm.router import machine


def test_failed_write_names_the_file_without_its_content(tmp_path):
    (tmp_path / "a file").touch()
    with pytest.raises(RunFailed, match=r"new\.service cannot be written on this machine: (?!.*Unit)"):
        machine.write(str(tmp_path / "a file" / "new.service"), "[Unit]\n" * 2)
