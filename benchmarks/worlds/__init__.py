"""Where the runs of the stability benchmark take place."""

from benchmarks.worlds.questions import QuestionWorld
from benchmarks.worlds.world import BenchmarkWorld

__all__ = ["BenchmarkWorld", "QuestionWorld"]
