"""Training: the loop, the optimiser, checkpoints, the run's folder."""
