"""The commands of a user: `sorl` and its subcommands. train.py, evaluate.py and quickstart.py run three of them."""
