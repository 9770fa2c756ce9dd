"""What the tests of search engines have in common."""

from __future__ import annotations

from sorl_trl.types import Passage

PASSAGES = [
    Passage("fr", "France", "The capital of France is Paris."),
    Passage("it", "Italy", "The capital of Italy is Rome; its river is the Tiber."),
    Passage("cw", "Curaçao", "Willemstad is the largest town."),
    Passage("jp", "東京", "東京は日本の首都。"),
    Passage("twin1", "Twin", "Gemini stars"),
    Passage("twin2", "Twin", "Gemini stars"),
    Passage("blank", "", "?!"),
]
"""A corpus: accents, Japanese, twins, and one without a word."""
