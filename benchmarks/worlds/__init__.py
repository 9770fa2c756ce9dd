"""Where the runs of the stability benchmark take place."""
