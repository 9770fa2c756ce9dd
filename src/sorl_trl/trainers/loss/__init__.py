"""The policy's loss, `bias_norm`, the metrics, and the learning rate that follows the KL."""
