"""What goes around an engine: a cache, retries, a circuit breaker, coalesced calls, recordings."""
