"""Forward TCP ports of this machine to many targets, in the kernel.

`file.py` reads ROUTER.toml into a `Mapping` (`mapping.py`), which `ruleset.py` writes for nftables. `machine.py` alone
reads and changes the machine; `apply.py` and `status.py` use it. The applied state is in three files: RULES for nft,
SYSCTL for the kernel settings and UNIT for systemd. `remove` deletes them.
"""
