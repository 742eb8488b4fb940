"""One process per system under test; they import nothing of this package but each other."""
