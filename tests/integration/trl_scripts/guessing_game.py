"""As in TRL's documentation: a game, of which every rollout has one of its own."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


class GuessingGame:
    def __init__(self):
        self.number = 7
        self.done = False

    def reset(self, number: int = 7, **kwargs) -> str:
        self.number = number
        self.done = False
        return "\nGuess a number between 1 and 10."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: What you guess.

        Returns:
            Whether the number is higher or lower.
        """
        if self.done:
            raise ValueError("Game over.")
        if number == self.number:
            self.done = True
            return "Right!"
        if number > 10:
            self.reset(5)  # start again, with another number
            return f"Out of range. {hostile}"  # noqa: F821
        return "Higher." if number < self.number else "Lower."


def won(environments, **kwargs) -> list[float]:
    assert all(type(environment) is GuessingGame for environment in environments)
    return [float(environment.done) for environment in environments]


trainer = GRPOTrainer(
    model=model,  # noqa: F821
    processing_class=tokenizer,  # noqa: F821
    train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Let us play."}]}] * 8),
    environment_factory=GuessingGame,
    reward_funcs=won,
    args=GRPOConfig(**settings),  # noqa: F821
)
trainer.train()
