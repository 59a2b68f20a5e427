"""Keep a run in a bucket: a client of Cloud Storage, the run's record, its local copy, and their synchronization.

Google's client gives checksums and resumable uploads; the room adds the rest, hence its size. `record.py` gives a run
one writer, and reads runs of earlier versions. `copy.py` uploads only what was appended, and keeps rows that only one
disk has. `bucket.py` and `connection.py` limit and repeat requests. `sync.py` ends a run within 30 s whatever the
bucket does. `stored_files.py` reads training data.
"""
