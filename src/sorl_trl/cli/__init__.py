"""The commands of a user: `sorl` and its subcommands. train.py and evaluate.py run two of them."""
