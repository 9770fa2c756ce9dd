"""Shows the trajectories of an evaluation or of training in one offline HTML page."""
