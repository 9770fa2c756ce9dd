"""How a sandbox policy is spoken to: tersely, because a tiny policy copies best from short observations.

About thirty tokens a trajectory; a second passage or a "Doc 1:" before the first makes copying much harder to learn.
"""

from __future__ import annotations

from dataclasses import replace

from sorl_trl.rollout import PROTOCOLS, RolloutLimits

PROMPT_TEMPLATE = "question : {question}"

PROTOCOL = PROTOCOLS["terse"]

LIMITS = RolloutLimits(max_turns=3, max_turn_tokens=16, max_observation_tokens=24, max_trajectory_tokens=112, top_k=1)
"""Two hops and one spare search; room for the longest names."""

LONG_LIMITS = replace(LIMITS, max_turns=5, max_trajectory_tokens=192)
"""Four hops and one spare search."""

THINKING_LIMITS = replace(LIMITS, max_turn_tokens=32, max_trajectory_tokens=200)
"""As many searches, and room for a thought before each action."""
