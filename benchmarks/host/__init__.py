"""What a step costs the host: the executor with engines that cost nothing."""
