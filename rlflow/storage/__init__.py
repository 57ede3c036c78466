"""Writes tensors and folders to a disk; a folder gets its name only when it is complete."""
