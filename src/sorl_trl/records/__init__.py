"""Trajectories in Parquet files: as an evaluation saw them, and as an update of the policy did."""

RECIPE_FILE = "recipe.yaml"
"""In the folder of a training run: what it was told."""
EVALUATION_FOLDER = "evaluation"
"""In the folder of a policy: its evaluation, unless another place is named."""
