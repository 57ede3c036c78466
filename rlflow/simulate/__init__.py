"""What a run would take on other machines, without running it."""
