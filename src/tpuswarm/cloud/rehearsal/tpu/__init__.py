"""The TPU API v2 in Google's published messages, for gRPC and REST."""
