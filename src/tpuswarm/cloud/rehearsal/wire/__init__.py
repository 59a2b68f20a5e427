"""gRPC and HTTP on loopback; both need the token."""
