"""Google Cloud through its official clients: machines, buckets, and what a project needs before it has machines.

Google's libraries are imported by the functions that call them: help and dry runs need neither them nor credentials.
"""
