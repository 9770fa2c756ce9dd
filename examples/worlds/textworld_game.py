"""A game that TextWorld generates on this machine: its own texts, points and admissible commands.

python -m pip install textworld
python -m examples.worlds.textworld_game tw-cooking 100 games > games.jsonl   # two seconds each
sorl train --environment examples.worlds.textworld_game.TextWorldGame --train_questions games.jsonl \
    --rewards environment --max_turns 20 --max_completion_length 4000 \
    --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --output_dir out
"""

from argparse import ArgumentParser
from pathlib import Path
from threading import Lock

import textworld
from textworld.challenges import CHALLENGES
from textworld.generator import compile_game

from examples.worlds.command import print_rows
from sorl_trl.rollout import ChatProtocol, Reply
from sorl_trl.types import StopReason

EASY = {"tw-treasure_hunter": ["--level", "3"], "tw-cooking": ["--recipe", "1", "--take", "1", "--open"]}
"""The kinds of game, with arguments of `tw-make`; others make harder ones."""
ONE_AT_A_TIME = Lock()  # all games of a process share TextWorld's parsers


class TextWorldGame:
    protocol = ChatProtocol()
    solved = False

    def reset(self, game):
        wanted = {"admissible_commands", "description", "max_score", "objective", "score", "won"}
        with ONE_AT_A_TIME:
            self.game = textworld.start(game, textworld.EnvInfos(**dict.fromkeys(wanted, True)))
            self.state = self.game.reset()
        return f"{self.state.objective}\n{self.state.description.strip()}{self._choices()}"

    def step(self, turn):
        command, before = turn.action.content.strip().lower(), self.state.score
        # Others, such as "save" and "restart", would write files or play a second game.
        if command not in self.state.admissible_commands:
            return Reply(f"That is not possible.{self._choices()}", role="user")
        with ONE_AT_A_TIME:
            self.state, _, done = self.game.step(command)
        reward, self.solved = (self.state.score - before) / self.state.max_score, self.state.won
        if done:
            self.game.close()
            return Reply(reward=reward, stop=StopReason.ENVIRONMENT_DONE)
        said = self.state.feedback.partition("\n>")[0].strip()
        return Reply(f"{said}{self._choices()}", reward=reward, role="user")

    def measures(self):
        return {"solved": float(self.solved)}

    def _choices(self):
        return "\nCommands: " + ", ".join(self.state.admissible_commands)


def rows(kind: str, count: int, folder: str, first: int = 0):
    """Generates the games that `folder` does not have yet."""
    prompt = [{"role": "user", "content": "Play this game. Each message of yours is one of the commands.\n"}]
    return [{"prompt": prompt, "game": generate(kind, first + number, Path(folder))} for number in range(count)]


def generate(kind, seed, folder):
    if kind not in EASY:
        raise ValueError(f"kind={kind!r} must be one of {[*EASY]}")
    path = folder / f"{kind}-{seed}.z8"
    if not path.exists():
        _, make, add_arguments = CHALLENGES[kind]
        parser = ArgumentParser()
        add_arguments(parser)
        options = textworld.GameOptions()
        options.seeds, options.path = seed, str(path)
        settings = vars(parser.parse_args(EASY[kind])) | {"recipe_seed": seed + 1}
        folder.mkdir(parents=True, exist_ok=True)
        compile_game(make(settings, options), options)
    return str(path)


if __name__ == "__main__":
    raise SystemExit(print_rows(rows, __doc__))
