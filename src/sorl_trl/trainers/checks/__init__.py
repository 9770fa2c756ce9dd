"""What is refused, or warned of, before a run: options without effect, noise in the ratios, unusable training sets."""
