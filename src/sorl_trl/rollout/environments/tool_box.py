"""The environment that ships beside search: a search engine, a calculator and tables, as the tools of one protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sorl_trl.rollout.environments.by_tool import ByTool, tool_of
from sorl_trl.rollout.environments.calculator import calculate
from sorl_trl.rollout.environments.environment import Reply, Responder
from sorl_trl.rollout.environments.responder import EnvironmentResponder
from sorl_trl.rollout.environments.search import SearchResponder
from sorl_trl.rollout.environments.tables import Rows, TableBounds, TableCopy, Tables
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.search import RetryPolicy, SearchBackend
from sorl_trl.types import Turn

CALCULATE, QUERY, SEARCH = "calculate", "query", "search"
_USES = {
    SEARCH: "a search query; passages are then shown to you",
    CALCULATE: "an arithmetic expression, such as 2 * (3 + 4) ** 2; its value is then shown to you",
    QUERY: "one statement of SQLite; its rows are then shown to you, and what you change stays changed",
}

TablesOf = Callable[[Mapping[str, Any]], Mapping[str, Rows]]
"""From an example, a row of the training set, to the tables that belong to it."""


class ToolBox(ByTool):
    """`<calculate>`, and with a search engine `<search>`, with tables `<query>`: an environment of several tools.

    ```python
    tools = ToolBox(index, {"cities": [{"name": "Oslo", "people": 709_000}, ...]})
    trainer = SOGRPOTrainer(..., rollout_func=AgentRollout(tools, tools.protocol))
    ```

    Searches of all rows go out together, each query once, and are tried again, as in a `SearchRollout`. Tables are a
    copy in memory for each trajectory (see `Tables`), which a policy may change. Whatever it writes, it is answered: a
    mistake of its is a text that says so.

    Args:
        search: Where queries go; None for no search. Several threads call it if it says `thread_safe = True`.
        tables: Name -> rows; or a function that makes them of an example; None for no tables.
        protocol: How passages, and what is said of a search that fails, are worded; its `tools` are replaced.
        top_k: The most passages per query.
        retry: How often and how long a search that is down is tried again.
        bounds: Of a trajectory's tables.

    Attributes:
        protocol: To be handed to the rollout.

    Raises what `Tables` raises for `tables`; TypeError for a search engine without `search_batch`.
    """

    def __init__(
        self,
        search: SearchBackend | None = None,
        tables: Mapping[str, Rows] | TablesOf | None = None,
        protocol: TagProtocol | None = None,
        top_k: int = 3,
        retry: RetryPolicy | None = None,
        bounds: TableBounds | None = None,
    ) -> None:
        wording = protocol or TagProtocol()
        own = EnvironmentResponder(partial(_Desk, tables if callable(tables) else _shared(tables, bounds), bounds))
        responders: dict[str, Responder] = {CALCULATE: own}
        if search is not None:
            responders[SEARCH] = SearchResponder(search, replace(wording, tools=(SEARCH,)), top_k, retry)
        if tables is not None:
            responders[QUERY] = own
        super().__init__(responders)
        self.protocol = replace(wording, tools=tuple(name for name in _USES if name in responders))

    @property
    def instructions(self) -> str:
        """What a prompt may say about the tools, a line each."""
        return "\n".join(f"<{name}> {_USES[name]} </{name}>" for name in self.protocol.tools)


class _Desk:
    """The calculator and the tables of one trajectory."""

    def __init__(self, tables: Tables | TablesOf | None, bounds: TableBounds | None) -> None:
        self._tables = tables
        self._bounds = bounds
        self._copy: TableCopy | None = None

    def reset(self, **example: Any) -> None:
        tables = self._tables if isinstance(self._tables, Tables | None) else self._tables(example)
        if tables is not None:
            self._copy = (tables if isinstance(tables, Tables) else Tables(tables, self._bounds)).copy()

    def step(self, turn: Turn) -> Reply:
        if tool_of(turn.action) == CALCULATE:
            return Reply(calculate(turn.action.content))
        assert self._copy is not None
        return Reply(self._copy.query(turn.action.content))


def _shared(tables: Mapping[str, Rows] | None, bounds: TableBounds | None) -> Tables | None:
    return None if tables is None else Tables(tables, bounds)
