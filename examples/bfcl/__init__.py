"""The multi-turn sets of the Berkeley Function Calling Leaderboard as an environment. See README.md."""
