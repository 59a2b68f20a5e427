"""Wait for something to become true."""

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 240.0, shown: Callable[[], Any] = lambda: "") -> Any:
    """Wait until `condition` returns something true; return that, or fail with what `shown` returns."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not true within {seconds:.0f} s\n{shown()}"
        time.sleep(0.02)
    return found
