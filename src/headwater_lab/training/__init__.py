"""Training: the loop, the optimizer, checkpoints, the run's folder."""
