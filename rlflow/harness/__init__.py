"""Agents that own their loop: they call a model by HTTP, and what the policy answers them becomes rows."""
