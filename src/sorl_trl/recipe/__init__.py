"""A recipe: its arguments, and the trainer that they describe. `train.py` reads recipes with it."""
