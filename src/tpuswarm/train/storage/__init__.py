"""A run in a bucket: a client of Cloud Storage, the record that says who owns the run and what it is, and its copy."""
