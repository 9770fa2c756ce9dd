from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.rollout.environments.tables import TableBounds, Tables

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="sqlite3 bounds nothing before Python 3.11")

CITIES = [{"name": "Oslo", "people": 700}, {"name": "Bern", "people": 130}, {"name": "Nowhere", "people": None}]
TALL = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
SHOWN = "name | people\nOslo | 700\nBern | 130\nNowhere | NULL"


@pytest.fixture
def tables() -> Tables:
    return Tables({"cities": CITIES})


def test_rows_are_shown_and_changes_stay_in_the_copy(tables: Tables) -> None:
    mine, other = tables.copy(), tables.copy()
    assert tables.schema == "cities(name, people)"
    assert mine.query("SELECT * FROM cities") == SHOWN
    assert mine.query("CREATE VIEW big AS SELECT name FROM cities WHERE people > 500") == "ok"
    assert mine.query("INSERT INTO cities VALUES ('Rome', 2700)") == "ok, rows changed: 1"
    assert mine.query("SELECT * FROM big") == "name\nOslo\nRome"
    assert mine.query("DELETE FROM cities") == "ok, rows changed: 4"
    assert mine.query("SELECT * FROM cities") == "name | people\n(no rows)"
    assert other.query("SELECT * FROM cities") == SHOWN
    assert other.query("SELECT * FROM big") == "error: no such table: big"
    assert tables.copy().query("SELECT count(*) n FROM cities") == "n\n3"


@pytest.mark.parametrize(
    ("sql", "answer"),
    [
        ("SELECT upper(name) || '!' AS n, round(people / 3.0, 1) FROM cities LIMIT 1", "n | round(people / 3.0, 1)"),
        ("SELECT x'00ff', NULL, 1.5", "x'00ff' | NULL | 1.5"),
        ("SELECT CAST(x'ff' AS TEXT)", "\ufffd"),
        ("CREATE INDEX i ON cities (name)", "ok"),
        ("CREATE TABLE t AS SELECT * FROM cities", "ok"),
        ("", "ok"),
        (f"{TALL}SELECT x FROM n", "(more than 50 rows)"),
        (f"{TALL}SELECT count(*) FROM n", "error: the query takes too long"),
        (f"{TALL}SELECT x FROM n ORDER BY -x", "error: the query takes too long"),
        (f"CREATE TABLE t AS {TALL}SELECT x FROM n", "error: "),
        (
            "WITH RECURSIVE n(x) AS (SELECT 'a' UNION ALL SELECT x || x FROM n) SELECT x FROM n",
            "error: string or blob",
        ),
        (
            "SELECT group_concat(a.name || b.name) FROM cities a, cities b, cities c, cities d, cities e, cities f",
            "big",
        ),
        (f"SELECT '{'a' * 6000}'", "error: query string is too large"),
        ("SELEC", "error: near"),
        ("SELECT 1; SELECT 2", "error: You can only execute one statement"),
        ("SELECT ?", "error: Incorrect number of bindings"),
        ("SELECT '\ud800'", "error: "),
        ("SELECT '\x00'", "error: "),
        ("SELECT abs(-9223372036854775808)", "error: integer overflow"),
        ("SELECT * FROM nowhere", "error: no such table"),
        (f"SELECT {'(' * 200}1{')' * 200}", "error: "),
    ],
)
def test_every_statement_is_answered(tables: Tables, sql: str, answer: str) -> None:
    copy = tables.copy()
    assert answer in copy.query(sql)
    assert copy.query("SELECT * FROM cities") == SHOWN, "and the copy is as it was"


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH '{file}' AS other",
        "VACUUM INTO '{file}'",
        "VACUUM",
        "PRAGMA database_list",
        "SELECT * FROM pragma_database_list",
        "PRAGMA max_page_count = 1000000",
        "SELECT load_extension('{file}')",
        "CREATE VIRTUAL TABLE f USING fts5(a)",
        "CREATE TRIGGER t AFTER INSERT ON cities BEGIN SELECT 1; END",
        "CREATE TEMP TABLE t (a)",
        "BEGIN",
        "SELECT random()",
        "SELECT randomblob(1000000000)",
        "SELECT printf('%.*c', 1000000000, 'x')",
        "SELECT date('now')",
        "SELECT current_timestamp",
    ],
)
def test_nothing_leaves_memory_and_nothing_depends_on_the_world(tables: Tables, sql: str, tmp_path: Path) -> None:
    answer = tables.copy().query(sql.format(file=tmp_path / "file"))
    assert "not authorized" in answer or "authorization denied" in answer
    assert not list(tmp_path.iterdir())


def test_a_copy_is_bounded(tables: Tables) -> None:
    copy = Tables({"cities": CITIES}, TableBounds(database_bytes=40_000)).copy()
    assert copy.query("CREATE TABLE t (a)") == "ok"
    long = f"INSERT INTO t VALUES ('{'a' * 1500}')"
    answers = [copy.query(long) for _ in range(40)]
    assert answers[0] == "ok, rows changed: 1" and answers[-1] == "error: database or disk is full"
    assert Tables({"cities": CITIES}, TableBounds(shown_rows=1)).copy().query("SELECT name FROM cities") == (
        "name\nOslo\n(more than 1 rows)"
    )
    slow = Tables({"cities": CITIES}, TableBounds(seconds=0)).copy()
    assert slow.query(f"{TALL}SELECT max(x) FROM n") == "error: the query takes too long"
    assert slow.query("SELECT 1 AS a") == "a\n1"


def test_the_same_query_ends_at_the_same_point(tables: Tables) -> None:
    """What a policy reads must not depend on how busy the machine is."""
    counted = [len(tables.copy().query(f"{TALL}SELECT x FROM n WHERE x % {step} = 0")) for step in (9_000, 9_000)]
    assert counted[0] == counted[1]


def test_copies_are_made_in_any_thread(tables: Tables) -> None:
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(tables.copy().query("SELECT * FROM cities"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [SHOWN] * 8


@pytest.mark.parametrize(
    ("given", "error", "problem"),
    [
        ({"t": []}, ValueError, r"tables\['t'\] has no rows"),
        ({"t": [{}]}, ValueError, r"tables\['t'\] has no rows or no columns"),
        ({"t": [{"a": 1}, {"b": 1}]}, ValueError, r"tables\['t'\]\[1\] has the columns \['b'\]"),
        ({"t": [{"a": [1]}]}, TypeError, r"tables\['t'\] has a value that is no text, number or None"),
        ({"t": [{"a": 2**70}]}, ValueError, r"tables\['t'\] cannot be made"),
        ({"t": [{"a": "x" * 3000}]}, ValueError, r"tables\['t'\] cannot be made: string or blob too big"),
        ({"sqlite_t": [{"a": 1}]}, ValueError, r"tables\['sqlite_t'\] cannot be made"),
    ],
)
def test_tables_that_cannot_be_made_are_named(given: Any, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        Tables(given)


def test_names_are_quoted() -> None:
    tables = Tables({'my "table"; x': [{'a "b"': 1, "select": 2}]})
    assert tables.schema == 'my "table"; x(a "b", select)'
    assert tables.copy().query('SELECT "select" FROM "my ""table""; x"') == "select\n2"


WORDS = [
    "SELECT",
    "*",
    "FROM",
    "cities",
    ",",
    "(",
    ")",
    "name",
    "people",
    "'",
    '"',
    ";",
    "--",
    "/*",
    "*/",
    "1",
    "NULL",
]
WORDS += ["INSERT INTO", "VALUES", "DELETE", "UPDATE", "SET", "=", "WHERE", "ORDER BY", "UNION ALL", "DROP TABLE", "?"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join) | st.text(max_size=30))
def test_nothing_is_raised(sql: str) -> None:
    assert isinstance(Tables({"cities": CITIES}).copy().query(sql), str)
