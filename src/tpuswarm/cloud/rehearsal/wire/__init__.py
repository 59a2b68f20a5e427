"""What brings requests to the cloud: gRPC and HTTP on loopback, both for those alone who have the token."""
