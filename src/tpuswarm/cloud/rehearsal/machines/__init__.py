"""Run hosts without root and containers: each is a folder with two loopback addresses, servers and processes.

A machine's files lie under its root folder, $TPUSWARM_ROOT: home/USER, dev/accel*, etc/environment, var/log. Programs
that would change this computer (sudo, apt-get, systemctl, mount, …) are stand-ins, first on the PATH; other absolute
paths are this computer's. Only processes with $TPUSWARM_REHEARSAL_MACHINE are ever signalled.
"""
