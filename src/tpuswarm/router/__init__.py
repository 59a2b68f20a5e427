"""Many targets behind one address: TCP ports of this machine, each translated to its own target by the kernel.

`file.py` reads ROUTER.toml into a `Mapping` (`mapping.py`), `ruleset.py` writes that as text for nftables and
`settings.py` says what to tune. `plan.py` decides, from what is there, what a change takes, and `status.py` what is not
as it should be. `machine.py` alone reads and changes the machine, `record.py` is what undoes it, `apply.py` puts these
together.
"""
