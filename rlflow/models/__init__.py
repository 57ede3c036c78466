"""The models of an algorithm: handles that load them, pack rows for them, and score rows with them."""
