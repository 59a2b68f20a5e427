"""The local cloud's TPU API v2: nodes, queued resources and operations, over gRPC and REST."""
