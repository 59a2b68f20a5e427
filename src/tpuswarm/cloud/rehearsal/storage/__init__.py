"""Buckets and objects: Cloud Storage's JSON API."""
