"""Scripts that generate documentation and check releases."""
