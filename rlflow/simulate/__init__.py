"""What a run would take on machines that are not here, from a config or from a paper's figures."""
