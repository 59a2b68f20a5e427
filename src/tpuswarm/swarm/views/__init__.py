"""Show a swarm's run: its status, commits, logs and report."""
