"""Switches of other people's methods, each off by default: what every turn-level config has beside SORL's own."""
