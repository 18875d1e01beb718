"""The parts of a model: attention with its stages, block, feed-forward, norms, positions, masks, the loss.

Letters in shapes, which also end the names of tensors whose shape changes (`q_BHTd`):

    B batch, T new tokens, S all tokens including cached ones, D model width
    H query heads, K key/value heads, G query heads of one key/value head, d head width, E joined heads (heads·d)
    N pairs of parameter tokens, W ways in which states are summed, J summands
"""
