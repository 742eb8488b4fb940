"""One process per system under test; workers import only each other from this package."""
