"""Keep a run in a bucket: a client of Cloud Storage, the run's record, its local copy, and their synchronization."""
