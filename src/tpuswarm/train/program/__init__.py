"""A program compiled for devices: mesh, sharding, the ways to run it, and what it costs there."""
