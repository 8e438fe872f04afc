"""Scripts that generate documentation and run studies."""
