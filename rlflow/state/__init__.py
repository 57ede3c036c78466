"""What a module keeps from step to step, in checkpoints too."""
