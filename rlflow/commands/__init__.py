"""What the command line does: configurations and their errors, graphs, reports, exports."""
