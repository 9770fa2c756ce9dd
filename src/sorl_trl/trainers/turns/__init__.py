"""Which tokens form a turn, which rewards a turn got, and a record of its training."""
