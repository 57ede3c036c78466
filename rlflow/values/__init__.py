"""The values that nodes read and make, and how their rows lie; what everything above speaks in."""
