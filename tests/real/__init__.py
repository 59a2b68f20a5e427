"""Real machines: Debian with systemd in containers, in a network of their own (`make test-real`; needs root)."""
