"""One member: its processes, its arrays on one host or several, one incarnation after the other."""
