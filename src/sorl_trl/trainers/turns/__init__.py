"""What a turn is, what it earned, and a record of what an update did to it."""
