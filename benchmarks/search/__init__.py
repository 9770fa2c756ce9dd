"""How fast the search engines are: `python -m benchmarks.search`."""
