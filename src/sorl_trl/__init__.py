"""Stabilized off-policy RL for multi-turn LLM agents, on top of TRL (SORL, arXiv 2511.20718)."""
