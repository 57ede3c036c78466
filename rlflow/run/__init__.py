"""One run: what it prepares, its loops over steps and validations, and what it leaves behind."""
