"""A game of TextArena with dice of its own: what `textarena_game.py` and `self_play.py` share."""

import random
from contextlib import contextmanager
from threading import Lock

import numpy
import textarena

from sorl_trl.command_line import UserMistake

ONE_AT_A_TIME = Lock()
OWN_MOVE = textarena.ObservationType.PLAYER_ACTION


class Table:
    """TextArena draws from generators of the whole process, in which many games run: each game brings its state."""

    def __init__(self, game, seed, players):
        self.dice = random.Random(seed).getstate(), numpy.random.RandomState(seed).get_state()
        try:
            with self.rolling():
                # "-raw" shows what is new instead of everything each time: the policy still reads the rest.
                self.game = textarena.make(f"{game}-raw")
                self.game.reset(num_players=players, seed=seed)
        except Exception as error:  # no such id, other players, words or a key that are missing, syntax of Python 3.12
            reason = next((line for line in str(error).splitlines() if line.strip(" *")), repr(error)).strip()
            raise UserMistake(f"TextArena's game {game!r} does not start: {reason}") from error

    @contextmanager
    def rolling(self):
        with ONE_AT_A_TIME:
            others = random.getstate(), numpy.random.get_state()
            self._take(self.dice)
            try:
                yield
            finally:
                self.dice = random.getstate(), numpy.random.get_state()
                self._take(others)

    def _take(self, dice):
        random.setstate(dice[0])
        numpy.random.set_state(dice[1])

    def look(self):
        """The number of the player whose turn it is, and what that player has not seen."""
        player, news = self.game.get_observation()
        known = [(player, OWN_MOVE), (textarena.GAME_ID, OWN_MOVE)]
        return player, "\n".join(str(text) for sender, text, kind in news if (sender, kind) not in known)

    def move(self, text):
        """Whether the game is over."""
        with self.rolling():
            return self.game.step(text)[0]

    def end(self):
        """The reward of each player, and whether the game ended because of an invalid move."""
        rewards, players = self.game.close()
        # Some games say why a move is invalid in the place of its reward, which is −1 by default.
        numbers = {player: float(each) if isinstance(each, int | float) else -1.0 for player, each in rewards.items()}
        return numbers, any(about["invalid_move"] for about in players.values())
