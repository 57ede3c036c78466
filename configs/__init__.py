"""The ready-made configs. A package so that a wheel carries them: `importlib.resources.files("rlflow.configs")`."""
