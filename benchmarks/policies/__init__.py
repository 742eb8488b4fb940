"""`faser bench policies`: every policy on the same requests, at fixed concurrency and under a bursty load."""
