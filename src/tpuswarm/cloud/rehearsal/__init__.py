"""A local cloud to rehearse on: a server on loopback that speaks Google's protocol to Google's own clients.

`connect` starts the server, whose state lies in one folder. `wire` takes requests (gRPC and REST); `tpu`, `compute`,
`storage` and `projects` answer them. The timetable holds future events. Every change is on the disk before its
answer leaves.

The protocol sets its size: about a hundred methods of seven APIs, with the errors that Google's clients expect.
"""
