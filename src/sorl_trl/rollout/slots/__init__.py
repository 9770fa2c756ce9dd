"""Generates with a Hugging Face model in this process: keys and values stay in slots, each token is read once."""

from sorl_trl.rollout.slots.engine import SlotEngine, model_engine
from sorl_trl.rollout.slots.support import NotServed

__all__ = ["NotServed", "SlotEngine", "model_engine"]
