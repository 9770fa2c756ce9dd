"""Environments that others have written, as environments and agents of this package."""
