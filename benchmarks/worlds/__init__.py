"""Where the runs of the stability benchmark take place."""

from benchmarks.worlds.hunt import Apprenticeship, HuntWorld
from benchmarks.worlds.questions import BenchmarkWorld, QuestionWorld
from benchmarks.worlds.working import WorkingWorld

__all__ = ["Apprenticeship", "BenchmarkWorld", "HuntWorld", "QuestionWorld", "WorkingWorld"]
