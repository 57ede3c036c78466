"""Commands of the command line: configurations and their errors, graphs, reports, exports."""
