"""What all rooms of the local cloud share: its records on the disk, its clock, its weather, its hosts, its refusals."""
