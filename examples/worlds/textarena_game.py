"""A single-player game of TextArena, by its id: its own prompt, observations, errors and rewards.

python -m pip install textarena
python -m examples.worlds.textarena_game FrozenLake-v0-random 1000 > games.jsonl
sorl train --environment examples.worlds.textarena_game.TextArenaGame --train_questions games.jsonl \
    --rewards environment --max_turns 20 --max_observation_tokens 1000 --max_completion_length 4000 \
    --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --output_dir out
"""

from examples.worlds.command import print_rows
from examples.worlds.textarena_table import Table
from sorl_trl.rollout import ChatProtocol, Reply
from sorl_trl.types import StopReason


class TextArenaGame:
    protocol = ChatProtocol()
    solved = invalid = False

    def reset(self, game, seed):
        """The same game for each trajectory of a group, because `seed` is a column as well."""
        self.table = Table(game, seed, players=1)
        return self.table.look()[1]

    def step(self, turn):
        if not self.table.move(turn.action.content):
            return Reply(self.table.look()[1], role="user")
        rewards, self.invalid = self.table.end()
        self.solved = rewards[0] >= 1
        return Reply(reward=rewards[0], stop=StopReason.ENVIRONMENT_DONE)

    def measures(self):
        return {"solved": float(self.solved), "ended_by_invalid_move": float(self.invalid)}


def rows(game: str, count: int, first: int = 0, players: int = 1):
    """Seeds count from `first`. Raises UserMistake if the game cannot be played here."""
    Table(game, first, players)
    prompt = [{"role": "user", "content": "Play this game. Each message of yours is one move.\n"}]
    return [{"prompt": prompt, "game": game, "seed": first + number} for number in range(count)]


if __name__ == "__main__":
    raise SystemExit(print_rows(rows, __doc__))
