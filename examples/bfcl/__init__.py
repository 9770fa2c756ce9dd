"""The multi-turn sets of the Berkeley Function Calling Leaderboard as an environment of your own: see README.md."""
