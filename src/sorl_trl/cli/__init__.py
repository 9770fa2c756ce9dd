"""The commands of a user: `sorl` and its subcommands, which train.py, evaluate.py and quickstart.py are too."""
