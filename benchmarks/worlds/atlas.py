"""A player of the quickstart's atlas in plain English that thinks before it acts, for a language model to imitate."""

from __future__ import annotations

from examples.quickstart.expert import Hasty, observations_in

from sorl_trl.qa import Question

OPENINGS = (
    "Let me think about this step by step.",
    "I will take this one step at a time.",
    "First I want to be clear about what is asked.",
    "Before I do anything, let me look at where I am.",
)
CLOSINGS = (
    "After that I will read carefully what comes back, and only then decide how to go on.",
    "When I have read the result, I will see whether anything is still missing.",
    "Then I will check if this is enough, or if one more fact has to be looked up.",
)
SURE = "I have read the passage twice, and I am sure."


class Ponderer(Hasty):
    """A `Hasty` expert that writes a thought of 60 to 100 tokens before each action, which follows from it.

    It answers early by thinking early that nothing is left to look up.
    """

    def _turn(self, question: Question, text: str) -> str:
        action, observations = super()._turn(question, text), observations_in(text)
        found, name = self._found(observations[-1]) if observations else (None, question.metadata["subject"])
        seen = f"The last passage tells me that the {found.noun} is {name}." if found else "The passage says nothing."
        if not observations:
            seen = f"I have not looked anything up yet, so I start with {name}."
        if action.startswith("<answer>"):
            plan = (
                f"That is what was asked for, so nothing is left to look up, and I can answer now with {name}. {SURE}"
            )
        else:
            noun = self._relations[question.metadata["relations"][len(observations)]].noun
            plan = f"What I need next is the {noun} of {name}, so I will search for that now."
            plan = f"{plan} {self._rng.choice(CLOSINGS)}"
        asked = question.question.removeprefix("What is ").removesuffix("?")
        return f"{self._rng.choice(OPENINGS)} The question is about {asked}. {seen} {plan} {action}"
