"""The services of a running node: samples, conversations, scores, metrics, and numbers over all rows."""
