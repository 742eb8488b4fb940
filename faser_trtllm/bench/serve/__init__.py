"""`faser bench serve`: load on a running service, and Triton's overhead over the in-process executor."""
