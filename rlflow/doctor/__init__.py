"""What `rlflow doctor` looks at: packages, the machine, the network, and small trials of what a run does.

Nothing here imports a package that may be missing: those are imported by children.
"""
