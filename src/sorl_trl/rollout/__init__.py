"""Collects trajectories in which a policy and its environment take turns. Token ids in, token ids out."""

from sorl_trl.rollout.collector import Collector
from sorl_trl.rollout.engines.base import Engine, Generation, TurnEnd, TurnRequest, generate_turns
from sorl_trl.rollout.engines.lockstep import Generator, HFGenerator, LockStepEngine
from sorl_trl.rollout.engines.slots import NotServed, SlotEngine, model_engine
from sorl_trl.rollout.environment import Environment, Reply, Responder, ResponderRow, environment_statistics
from sorl_trl.rollout.observation import ObservationEncoder, Sanitizer
from sorl_trl.rollout.options import PROTOCOLS, EngineOptions, RolloutArguments, RolloutLimits
from sorl_trl.rollout.protocol import ChatProtocol, Frame, TagProtocol, chat_message_frame
from sorl_trl.rollout.responder import EnvironmentResponder
from sorl_trl.rollout.search_responder import SearchResponder
from sorl_trl.rollout.tools import ToolBox
from sorl_trl.rollout.trajectories import rollout_statistics
from sorl_trl.search import RetryPolicy

__all__ = [
    "PROTOCOLS",
    "ChatProtocol",
    "Collector",
    "Engine",
    "EngineOptions",
    "Environment",
    "EnvironmentResponder",
    "Frame",
    "Generation",
    "Generator",
    "HFGenerator",
    "LockStepEngine",
    "NotServed",
    "ObservationEncoder",
    "Reply",
    "Responder",
    "ResponderRow",
    "RetryPolicy",
    "RolloutArguments",
    "RolloutLimits",
    "Sanitizer",
    "SearchResponder",
    "SlotEngine",
    "TagProtocol",
    "ToolBox",
    "TurnEnd",
    "TurnRequest",
    "chat_message_frame",
    "environment_statistics",
    "generate_turns",
    "model_engine",
    "rollout_statistics",
]
