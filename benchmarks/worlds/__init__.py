"""Where the runs of the stability benchmark take place."""

from benchmarks.worlds.hunt import Apprenticeship, HuntWorld
from benchmarks.worlds.questions import QuestionWorld
from benchmarks.worlds.working import WorkingWorld
from benchmarks.worlds.world import BenchmarkWorld

__all__ = ["Apprenticeship", "BenchmarkWorld", "HuntWorld", "QuestionWorld", "WorkingWorld"]
