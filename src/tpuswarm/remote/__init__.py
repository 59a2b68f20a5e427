"""Reaches machines: connections, the same on many hosts at once, programs that go on without us.

It knows hosts as plain values; which machines of which fleet they are is `fleet/hosts/routes.py`'s.
"""
