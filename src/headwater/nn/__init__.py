"""The parts of a model: attention with its stages, block, feed-forward, norms, positions, masks, the loss."""
