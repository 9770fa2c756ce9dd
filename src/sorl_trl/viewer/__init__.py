"""One offline HTML page to read trajectories in, of an evaluation or of training."""
