"""One program over several hosts: how they find each other, learn of a death, and decide alike."""
