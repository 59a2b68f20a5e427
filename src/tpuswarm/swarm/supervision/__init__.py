"""From what was asked of `train --members` to processes that are kept alive."""
