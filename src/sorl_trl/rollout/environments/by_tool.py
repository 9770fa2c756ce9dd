"""Several responders side by side: each tool of the protocol is answered by one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sorl_trl.rollout.environments.environment import Reply, Responder, RowTurn
from sorl_trl.types import Action, ActionKind


def tool_of(action: Action) -> str:
    """The tag by which an action calls a tool: that of a search is "search". Empty for what is no call."""
    return ActionKind.SEARCH.value if action.kind is ActionKind.SEARCH else action.tool


class ByTool(Responder):
    """Has each turn answered by the responder of the tool that it calls; all that call one tool are asked together.

    ```python
    ByTool({"search": SearchResponder(index), "move": EnvironmentResponder(Maze), "look": ...})
    ```

    One responder may answer several tools: then their state is one. What several say in greeting is joined, line by
    line; `environments` are those of the first responder that has some.

    Raises ValueError for no responder at all, TypeError for an object that is none.
    """

    def __init__(self, responders: Mapping[str, Responder]) -> None:
        if not responders:
            raise ValueError("responders is empty: it must name at least one tool")
        for name, responder in responders.items():
            if not isinstance(responder, Responder):
                raise TypeError(f"responders[{name!r}] is a {type(responder).__name__}, but must be a `Responder`")
        self._responders = dict(responders)
        self._distinct = list({id(each): each for each in responders.values()}.values())

    @property
    def environments(self) -> Sequence[Any]:  # type: ignore[override]
        return next((each.environments for each in self._distinct if each.environments), ())

    def greet(self, examples: Sequence[Mapping[str, Any]]) -> Sequence[str | None]:
        """See `Responder.greet`."""
        said = zip(*(each.greet(examples) for each in self._distinct), strict=True)
        return ["\n".join(filter(None, texts)) or None for texts in said]

    def open(self, examples: Sequence[Mapping[str, Any]]) -> None:
        """See `Responder.open`."""
        for each in self._distinct:
            each.open(examples)

    def ask(self, turns: Sequence[RowTurn]) -> list[Future[Reply]]:
        """See `Responder.ask`. Raises ValueError for a tool without a responder."""
        places: dict[int, list[int]] = {}
        for place, each in enumerate(turns):
            name = tool_of(each.turn.action)
            if name not in self._responders:
                raise ValueError(f"nobody answers the tool {name!r}: there are {sorted(self._responders)}")
            places.setdefault(id(self._responders[name]), []).append(place)
        replies: dict[int, Future[Reply]] = {}
        for responder in self._distinct:
            asked = places.get(id(responder), [])
            replies |= zip(asked, responder.ask([turns[place] for place in asked]) if asked else (), strict=True)
        return [replies[place] for place in range(len(turns))]

    def close(self) -> None:
        """See `Responder.close`."""
        for each in self._distinct:
            each.close()
