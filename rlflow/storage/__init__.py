"""How tensors and folders come to lie on a disk, whole or not at all."""
