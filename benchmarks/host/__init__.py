"""What a step costs the host: the executor with engines that compute nothing."""
