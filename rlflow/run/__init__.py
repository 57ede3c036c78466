"""One run: its preparation, its loops over steps and validations, and its results."""
