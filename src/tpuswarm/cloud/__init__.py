"""Clouds: a protocol in our own types, its implementation for Google, and a local cloud.

The local cloud, `rehearsal`, is a server that speaks Google's protocol; `google` uses it unchanged. The server is three
quarters of this room: a rehearsal shows only faults and answers that it knows.
"""
