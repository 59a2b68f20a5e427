"""One member: its two processes, its arrays on one host or several, one incarnation after the other."""
