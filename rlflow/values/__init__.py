"""The values that nodes read and make, and the layouts of their rows: the types that the rest of rlflow works with."""
