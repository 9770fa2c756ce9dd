"""The user's commands: `sorl` and its subcommands. train.py and evaluate.py run two of them."""
