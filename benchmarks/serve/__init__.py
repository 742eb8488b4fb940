"""`faser bench serve`: published benchmarks against any OpenAI server."""
