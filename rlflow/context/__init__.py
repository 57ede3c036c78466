"""What a node may ask for while it runs: samples, conversations, scores, metrics, and numbers over all rows."""
