"""Whatever does not divide is said, and what is proposed in its place does."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.doctor.reading.groups import mend_groups
from sorl_trl.doctor.reading.recipe_file import RecipeFile

NO_RECIPE = RecipeFile("recipe.yaml", {}, {}, frozenset())
counts = st.integers(1, 24)


@given(counts, counts, counts, counts, counts, st.sampled_from(["so_grpo", "so_ppo"]))
def test_what_is_proposed_divides(size: int, rows: int, steps: int, eval_rows: int, processes: int, name: str) -> None:
    raw = SimpleNamespace(
        trainer=name,
        num_generations=size,
        num_generations_eval=None,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=eval_rows,
        steps_per_generation=steps,
        gradient_accumulation_steps=7,
        generation_batch_size=None,
        eval_strategy="steps",
    )
    fits = rows * steps * processes % size == 0 and (size > 1 or name == "so_ppo")
    found = list(mend_groups(NO_RECIPE, raw, processes))
    assert (fits and eval_rows * processes % size == 0) == (not found)
    for _, mended in found:
        vars(raw).update(mended)
    assert raw.num_generations > 1 or name == "so_ppo"
    assert raw.per_device_train_batch_size * raw.steps_per_generation * processes % raw.num_generations == 0
    assert raw.per_device_eval_batch_size * processes % raw.num_generations == 0
    assert not list(mend_groups(NO_RECIPE, raw, processes))
