"""Generates with a Hugging Face model in this process. Each row's KV cache survives between turns, in a slot."""

from sorl_trl.rollout.engines.slots.engine import SlotEngine, model_engine
from sorl_trl.rollout.engines.slots.support import NotServed, check_served

__all__ = ["NotServed", "SlotEngine", "check_served", "model_engine"]
