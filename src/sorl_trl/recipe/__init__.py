"""A recipe: its arguments, and the trainer that is built of them. `train.py` reads recipes with it."""
