"""`rlflow doctor`: checks of packages, machine and network, and small trial runs."""
