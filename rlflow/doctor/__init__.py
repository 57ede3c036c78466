"""`rlflow doctor`: what is looked at, and small trials of what a run does."""
