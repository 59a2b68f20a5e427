"""Clouds: one small protocol in our own types, Google's back end, and a local cloud to rehearse on.

`rehearsal` is no second back end: it is a server that speaks Google's protocol, which `google` drives unchanged.
"""
