"""Collects trajectories: a policy and a search engine taking turns. Token ids in, token ids out."""

from sorl_trl.rollout.arguments import PROTOCOLS, RolloutArguments
from sorl_trl.rollout.assembly import AssembledTrajectory, assemble, check_assembly
from sorl_trl.rollout.collector import Collector
from sorl_trl.rollout.encoding import ObservationEncoder
from sorl_trl.rollout.generation import Generation, Generator, HFGenerator, TurnEnd
from sorl_trl.rollout.limits import RolloutLimits
from sorl_trl.rollout.protocol import Frame, TagProtocol, chat_message_frame
from sorl_trl.rollout.statistics import rollout_statistics
from sorl_trl.search import RetryPolicy

__all__ = [
    "PROTOCOLS",
    "AssembledTrajectory",
    "Collector",
    "Frame",
    "Generation",
    "Generator",
    "HFGenerator",
    "ObservationEncoder",
    "RetryPolicy",
    "RolloutArguments",
    "RolloutLimits",
    "TagProtocol",
    "TurnEnd",
    "assemble",
    "chat_message_frame",
    "check_assembly",
    "rollout_statistics",
]
