"""Reads a recipe file and a command line as `train.py` does, but goes on after a problem."""
