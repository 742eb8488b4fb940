"""`faser bench host`: the host's time per step, with engines that compute nothing."""
