"""A live web page of a run and its fleet, and the same figures for Prometheus."""
