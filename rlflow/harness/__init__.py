"""Agents that own their loop: they call a model by HTTP, and the policy's answers become rows."""
