"""Google Cloud through its official clients: machines, buckets, and the set-up of a project.

Google's libraries are imported by the functions that call them: help and dry runs need neither them nor credentials.
"""
