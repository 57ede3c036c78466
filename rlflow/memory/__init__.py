"""The memory of a run: estimates before it starts, and the error when memory runs out."""
