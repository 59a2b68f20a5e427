"""Members that can only dial out: they reach the swarm by HTTPS, with an invite."""
