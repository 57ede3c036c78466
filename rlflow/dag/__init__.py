"""The graph of an algorithm: its nodes, the checks, and the plan of every rank."""
