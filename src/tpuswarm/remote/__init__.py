"""Reach hosts over SSH: run commands and jobs, copy and sync files, forward ports, set machines up.

This package knows hosts as values; `fleet/hosts/routes.py` finds them. It cannot lean on installed programs: hosts have
only their own Python and shell, so supervise.py, sync/receive.py and the scripts of set-up are sent as text.
"""
