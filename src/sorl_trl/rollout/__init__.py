"""Collects trajectories: a policy and its environment taking turns. Token ids in, token ids out."""

from sorl_trl.rollout.arguments import PROTOCOLS, RolloutArguments
from sorl_trl.rollout.assembly import AssembledTrajectory, assemble, check_assembly
from sorl_trl.rollout.collector import Collector
from sorl_trl.rollout.encoding import ObservationEncoder
from sorl_trl.rollout.engine import Engine, EngineWork, LockStepEngine, generate_turns
from sorl_trl.rollout.environments.by_tool import ByTool
from sorl_trl.rollout.environments.environment import BatchResponder, Environment, Reply, Responder, RowTurn
from sorl_trl.rollout.environments.responder import EnvironmentResponder
from sorl_trl.rollout.environments.search import SearchResponder
from sorl_trl.rollout.environments.tables import TableBounds, Tables
from sorl_trl.rollout.environments.tool_box import ToolBox
from sorl_trl.rollout.environments.trl_objects import TRLEnvironments
from sorl_trl.rollout.generation import Generation, Generator, HFGenerator, TurnEnd
from sorl_trl.rollout.limits import RolloutLimits
from sorl_trl.rollout.options import EngineOptions
from sorl_trl.rollout.protocol import Frame, TagProtocol, chat_message_frame
from sorl_trl.rollout.slots import NotServed, SlotEngine, SlotOptions, model_engine
from sorl_trl.rollout.statistics import rollout_statistics, time_statistics
from sorl_trl.rollout.timeline import Phase, Span, Timeline
from sorl_trl.search import RetryPolicy

__all__ = [
    "PROTOCOLS",
    "AssembledTrajectory",
    "BatchResponder",
    "ByTool",
    "Collector",
    "Engine",
    "EngineOptions",
    "EngineWork",
    "Environment",
    "EnvironmentResponder",
    "Frame",
    "Generation",
    "Generator",
    "HFGenerator",
    "LockStepEngine",
    "NotServed",
    "ObservationEncoder",
    "Phase",
    "Reply",
    "Responder",
    "RetryPolicy",
    "RolloutArguments",
    "RolloutLimits",
    "RowTurn",
    "SearchResponder",
    "SlotEngine",
    "SlotOptions",
    "Span",
    "TRLEnvironments",
    "TableBounds",
    "Tables",
    "TagProtocol",
    "Timeline",
    "ToolBox",
    "TurnEnd",
    "assemble",
    "chat_message_frame",
    "check_assembly",
    "generate_turns",
    "model_engine",
    "rollout_statistics",
    "time_statistics",
]
