"""Writes tensors and folders to a disk, whole or not at all."""
