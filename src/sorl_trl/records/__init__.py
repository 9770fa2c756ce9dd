"""Trajectories in Parquet files: as an evaluation saw them, and as an update of the policy did."""
