"""Predicts the time, bytes and memory of a run on other machines, without running it."""
