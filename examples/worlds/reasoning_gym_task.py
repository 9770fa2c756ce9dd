"""A task of reasoning-gym, with its own scorer as the reward; with `--tries`, wrong answers may be mended.

python -m pip install reasoning-gym
python -m examples.worlds.reasoning_gym_task chain_sum 1000 --tries 3 > tasks.jsonl
sorl train --environment examples.worlds.reasoning_gym_task.ReasoningGymTask --train_questions tasks.jsonl \
    --rewards environment --max_turns 3 --max_completion_length 1000 \
    --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --output_dir out
"""

from reasoning_gym import create_dataset
from reasoning_gym.utils import extract_answer

from examples.worlds.command import print_rows
from sorl_trl.command_line import UserMistake
from sorl_trl.rollout import ChatProtocol, Reply
from sorl_trl.types import StopReason

PROMPT = "Solve this. Write your answer as <answer> and </answer>, with nothing else between them.\n"


INTEGRALS = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
EVALUATED = (*INTEGRALS, *LISTS, "countdown", "puzzle24")
"""Tasks with scorers that run the answer as Python code."""


class ReasoningGymTask:
    protocol = ChatProtocol()
    solved = False

    def reset(self, task, seed, tries):
        self.tasks = tasks(task, seed)
        self.task, self.left = self.tasks[0], tries
        return self.task["question"]

    def step(self, turn):
        self.left -= 1
        answer = extract_answer(turn.action.content)
        try:
            score = float(self.tasks.score_answer(answer, self.task))
        except Exception:  # some scorers raise what their parser does, whatever that is
            score = 0.0
        self.solved = score == 1
        if self.solved or not self.left:
            return Reply(reward=score, stop=StopReason.ENVIRONMENT_DONE)
        return Reply(f"{answer or 'What is not within the tags'} scores {score:.2g} of 1. Try again.", role="user")

    def measures(self):
        return {"solved": float(self.solved)}


def tasks(task, seed):
    """A data set of one task. Raises ValueError if there is none of that name, or if answers to it could run code."""
    if task in EVALUATED:
        raise UserMistake(f"the scorer of {task!r} runs answers as Python code: use another task, or a sandbox")
    return create_dataset(task, seed=seed, size=1)


def rows(task: str, count: int, first: int = 0, tries: int = 1):
    tasks(task, first)
    prompt = [{"role": "user", "content": PROMPT}]
    return [{"prompt": prompt, "task": task, "seed": first + number, "tries": tries} for number in range(count)]


if __name__ == "__main__":
    raise SystemExit(print_rows(rows, __doc__))
