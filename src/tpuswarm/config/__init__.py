"""What people write, read precisely: counts, durations, names, and errors that suggest the nearest right one."""
