"""Hosts made real: each a folder, two addresses of 127.0.0.0/8, an SSH server, a metadata server and processes.

No root, no containers, no namespaces. A machine's files are under its root folder, $TPUSWARM_ROOT to what runs there:
home/USER, dev/accel*, tmp/libtpu_lockfile, etc/environment, var/log. What is written to other absolute paths is written
on this computer; programs that would change it (sudo, apt-get, systemctl, mount, …) are stand-ins, first on the PATH.
Processes are known by $TPUSWARM_REHEARSAL_MACHINE, and none without it is ever signalled.
"""
