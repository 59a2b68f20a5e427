"""What init and preflight ask besides machines: projects with their billing, services and quotas; and buckets."""
