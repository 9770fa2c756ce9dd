"""What changes the training loop itself, each in a file of its own. It may change or go in any version."""
