"""Tables that a policy may query and change by SQL: a copy in memory, bounded in every direction, and never a file."""

from __future__ import annotations

import sqlite3
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from sorl_trl.checks import POSITIVE_COUNT, SECONDS, Checked

Rows: TypeAlias = "Sequence[Mapping[str, Any]]"

_OPERATIONS_AT_ONCE = 1000
_PAGE_BYTES = 4096
_MAX_SQL = 5_000
_MAX_SHOWN = 20_000
"""Characters of an answer; an observation is hardly ever as long."""
_SQLITE_LIMITS = {
    "SQLITE_LIMIT_SQL_LENGTH": _MAX_SQL,
    "SQLITE_LIMIT_COLUMN": 200,
    "SQLITE_LIMIT_EXPR_DEPTH": 100,
    "SQLITE_LIMIT_COMPOUND_SELECT": 20,
    "SQLITE_LIMIT_LIKE_PATTERN_LENGTH": 100,
    "SQLITE_LIMIT_ATTACHED": 0,
    "SQLITE_LIMIT_TRIGGER_DEPTH": 1,
}
_ACTIONS = {
    *(sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE),
    *(sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE),
    *(sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_CREATE_VIEW, sqlite3.SQLITE_CREATE_INDEX),
    *(sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_DROP_VIEW, sqlite3.SQLITE_DROP_INDEX),
    sqlite3.SQLITE_REINDEX,  # which CREATE INDEX does
}
"""What a statement may do. No PRAGMA, ATTACH (VACUUM INTO is one), trigger, virtual table or transaction, and nothing
temporary, which has no bound of its own."""
_FUNCTIONS = {
    *("abs", "avg", "char", "coalesce", "concat", "concat_ws", "count", "cume_dist", "dense_rank", "first_value"),
    *("group_concat", "ifnull", "iif", "instr", "lag", "last_value", "lead", "length", "like", "glob", "lower"),
    *("ltrim", "max", "min", "nth_value", "ntile", "nullif", "percent_rank", "rank", "replace", "round"),
    *("row_number", "rtrim", "sign", "string_agg", "substr", "substring", "sum", "total", "trim", "typeof"),
    *("unicode", "upper"),
}
"""Which give the same for the same arguments: nothing random, and no clock. Their names as SQLite has them."""


@dataclass(frozen=True)
class TableBounds(Checked):
    """How far a policy's SQL may go. The defaults are ours. Raises ValueError for a bound out of range."""

    operations: Annotated[int, POSITIVE_COUNT] = 500_000
    """Of SQLite's virtual machine, for one query; counted, so that the same query ends at the same point each time."""
    seconds: Annotated[float, SECONDS] = 10.0
    """For one query, where its operations are unusually slow."""
    value_bytes: Annotated[int, POSITIVE_COUNT] = 2_000
    """Of a text, and of a row: a query that sorts takes up to that for every five `operations`."""
    database_bytes: Annotated[int, POSITIVE_COUNT] = 8 * 2**20
    """Of one trajectory's copy."""
    shown_rows: Annotated[int, POSITIVE_COUNT] = 50
    """Of an answer: how many more there are is not said."""


class Tables:
    """Some tables, as every trajectory finds them.

    Args:
        tables: Name -> rows, each a mapping from the names of the columns, the same in each row of a table, to values:
            text, numbers or None.
        bounds: Of what a policy does to its copy.

    Raises ValueError for a table without rows, rows with different columns, and tables that the bounds have no room
    for; TypeError for a value of another kind; RuntimeError where Python cannot bound SQLite (before 3.11).
    """

    def __init__(self, tables: Mapping[str, Rows], bounds: TableBounds | None = None) -> None:
        self.bounds = bounds or TableBounds()
        if not hasattr(sqlite3.Connection, "setlimit"):
            raise RuntimeError("tables need Python 3.11 or newer: before, sqlite3 cannot bound the size of a value")
        # Copied by one thread at a time, whichever it is.
        self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._database.close)
        self._lock = threading.Lock()
        _bound(self._database, self.bounds)
        for name, rows in tables.items():
            self._add(name, rows)

    @property
    def schema(self) -> str:
        """Tables and columns, for a prompt: a line each."""
        with self._lock:
            names = [name for (name,) in self._database.execute("SELECT name FROM sqlite_schema")]
            columns = {name: self._database.execute(f"SELECT * FROM {_quoted(name)} LIMIT 0") for name in names}
            return "\n".join(
                f"{name}({', '.join(each[0] for each in cursor.description)})" for name, cursor in columns.items()
            )

    def copy(self) -> TableCopy:
        """A copy for one trajectory. It must stay in the thread that asked for it."""
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        with self._lock:
            self._database.backup(connection)
        return TableCopy(connection, self.bounds)

    def _add(self, name: str, rows: Rows) -> None:
        columns = list(rows[0]) if len(rows) else []
        if not columns:
            raise ValueError(f"tables[{name!r}] has no rows or no columns: both are needed to make a table")
        for i, row in enumerate(rows):
            if list(row) != columns:
                raise ValueError(f"tables[{name!r}][{i}] has the columns {list(row)}, but the first row has {columns}")
        places = ", ".join("?" * len(columns))
        try:
            self._database.execute(f"CREATE TABLE {_quoted(name)} ({', '.join(map(_quoted, columns))})")
            self._database.executemany(
                f"INSERT INTO {_quoted(name)} VALUES ({places})", [list(row.values()) for row in rows]
            )
        except (sqlite3.InterfaceError, sqlite3.ProgrammingError) as error:
            raise TypeError(f"tables[{name!r}] has a value that is no text, number or None: {error}") from error
        except (sqlite3.Error, OverflowError) as error:
            raise ValueError(f"tables[{name!r}] cannot be made: {error}") from error


class TableCopy:
    """A trajectory's own copy of some tables: what it changes stays changed, for itself alone."""

    def __init__(self, connection: sqlite3.Connection, bounds: TableBounds) -> None:
        self._connection = connection
        self._bounds = bounds
        self._left, self._until = 0, 0.0
        weakref.finalize(self, connection.close)
        _bound(connection, bounds)
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        connection.set_authorizer(_authorize)
        _count_operations(weakref.ref(self), connection)

    def query(self, sql: str) -> str:
        """What a statement gives, or what is wrong with it, as text. It raises nothing, whatever a policy writes."""
        self._left, self._until = self._bounds.operations, time.monotonic() + self._bounds.seconds
        try:
            cursor = self._connection.execute(sql)
            try:
                if cursor.description is None:
                    return f"ok, rows changed: {cursor.rowcount}" if cursor.rowcount >= 0 else "ok"
                rows = cursor.fetchmany(self._bounds.shown_rows + 1)
                return self._shown([name for name, *_ in cursor.description], rows)
            finally:
                cursor.close()
        except sqlite3.OperationalError as error:
            return "error: the query takes too long" if str(error) == "interrupted" else f"error: {error}"
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            return f"error: {error}"
        except MemoryError:
            return "error: the query takes too much memory"

    def _shown(self, names: list[str], rows: list[tuple[Any, ...]]) -> str:
        lines = [" | ".join(names), *(" | ".join(map(_cell, row)) for row in rows[: self._bounds.shown_rows])]
        if len(rows) > self._bounds.shown_rows:
            lines.append(f"(more than {self._bounds.shown_rows} rows)")
        if not rows:
            lines.append("(no rows)")
        return "\n".join(lines)[:_MAX_SHOWN]

    def went_on(self) -> bool:
        """Count operations; whether too many were made."""
        self._left -= _OPERATIONS_AT_ONCE
        return self._left < 0 or time.monotonic() > self._until


def _bound(connection: sqlite3.Connection, bounds: TableBounds) -> None:
    for pragma in ("temp_store = memory", f"max_page_count = {max(bounds.database_bytes // _PAGE_BYTES, 1)}"):
        connection.execute(f"PRAGMA {pragma}")
    limits = {**_SQLITE_LIMITS, "SQLITE_LIMIT_LENGTH": bounds.value_bytes}
    for name, limit in limits.items():
        connection.setlimit(getattr(sqlite3, name), limit)  # type: ignore[attr-defined,unused-ignore]


def _count_operations(copy: weakref.ref[TableCopy], connection: sqlite3.Connection) -> None:
    """Weakly: a connection that knew its own copy would never be let go."""

    def interrupt() -> bool:
        counting = copy()
        return counting is None or counting.went_on()

    connection.set_progress_handler(interrupt, _OPERATIONS_AT_ONCE)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    is_allowed = action in _ACTIONS or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS)
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _cell(value: Any) -> str:
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return "NULL" if value is None else str(value)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
