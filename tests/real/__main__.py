"""Print why this computer cannot run real machines, if it cannot: `python -m tests.real`."""

from tests.real.cloud import why_not

print(why_not())
