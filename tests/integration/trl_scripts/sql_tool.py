"""As in TRL's documentation: a tool that hands out the rows of a database."""

import sqlite3

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

connection = sqlite3.connect(":memory:")
connection.execute("create table cities (id integer, name text, country text)")
connection.execute("insert into cities values (1, 'Oslo', 'Norway'), (2, 'Bern', ?)", (hostile,))  # noqa: F821


def query(sql_command: str) -> list[tuple]:
    """
    Execute a read-only SQL command on the database.

    Args:
        sql_command: The SQL command to execute.

    Returns:
        A list of rows.
    """
    cursor = connection.cursor()
    cursor.execute(sql_command)
    return cursor.fetchall()


def correct_reward(completions, answer, **kwargs):
    return [float(right in completion[-1]["content"]) for completion, right in zip(completions, answer, strict=True)]


questions = [{"prompt": [{"role": "user", "content": "Where is Oslo?"}], "answer": "Norway"}] * 8
trainer = GRPOTrainer(
    model=model,  # noqa: F821
    processing_class=tokenizer,  # noqa: F821
    train_dataset=Dataset.from_list(questions),
    tools=[query],
    reward_funcs=correct_reward,
    args=GRPOConfig(**settings),  # noqa: F821
)
trainer.train()
