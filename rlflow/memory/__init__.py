"""What a run takes of memory: estimates before, and words when it is not there."""
