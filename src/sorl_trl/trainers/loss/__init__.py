"""What is put around TRL's loss: turn ratios, clipping-triggered normalization, metrics, and the KL schedule."""
