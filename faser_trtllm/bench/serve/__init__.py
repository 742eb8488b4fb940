"""`faser bench serve`: load on a running service, and what Triton costs beside the executor in process."""
