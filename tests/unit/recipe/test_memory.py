"""What a run takes of each device's memory, by hand, and what is turned first where that is too much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sorl_trl.recipe.memory import Sizes, estimate, remedies

GIB = 2**30
SIZES = Sizes(
    weights=4 * GIB,
    trained=GIB,
    gradients=4 * GIB,
    optimizer=8 * GIB,
    layers=2,
    hidden=64,
    inner=256,
    keys_and_values=32,
    vocabulary=1000,
    rows=4,
    longest=1024,
    generated=16,
    on_gpu=True,
    head_is_trained=False,
)
LAYER = 4 * 1024 * (6 * 64 * 4 + (6 * 64 + 4 * 256) * 4)
KEPT = 2 * 4 * 1024 * 64 * 4
TILE = 4096 * 32768 * 4


def test_a_step_by_hand() -> None:
    memory = estimate(SIZES)
    assert memory.rows == {
        "weights": 4 * GIB,
        "gradients": 4 * GIB,
        "optimizer": 8 * GIB,
        "activations": KEPT + LAYER,
        "logits": TILE,
        "keys and values": 16 * 1024 * 2 * 32 * 4,
    }
    assert memory.training == 16 * GIB + KEPT + LAYER, "the tile is gone when all gradients are there"
    assert memory.generating == 12 * GIB + 16 * 1024 * 2 * 32 * 4
    assert memory.peak == memory.training
    assert estimate(replace(SIZES, accumulates=True)).training == 16 * GIB + KEPT + TILE


@pytest.mark.parametrize(("stage", "gib"), [(0, 16), (1, 10), (2, 7), (3, 4)])
def test_what_is_sharded(stage: int, gib: int) -> None:
    sharded = estimate(replace(SIZES, stage=stage, processes=4))
    assert (
        sharded.training
        == max(gib * GIB + LAYER, (4 if stage < 3 else 1) * GIB + sharded.rows["optimizer"] + TILE) + KEPT
    )
    assert sharded.rows.get("weights gathered to generate", 0) == (3 * GIB if stage == 3 else 0)


def test_a_vllm_that_sleeps_leaves_its_memory_to_training() -> None:
    awake = estimate(replace(SIZES, generated=0, vllm=30 * GIB))
    asleep = estimate(replace(SIZES, generated=0, vllm=30 * GIB, sleeps=True))
    assert awake.training - asleep.training == 30 * GIB
    assert awake.generating == asleep.generating == 42 * GIB


def test_without_checkpoints_all_layers_are_kept() -> None:
    assert estimate(replace(SIZES, checkpoints=False)).rows["activations"] == 2 * LAYER


def test_what_to_turn_is_not_turned_already() -> None:
    assert [line.split()[0] for line in remedies(SIZES)] == ["half", "use_peft", "less"]
    much = replace(SIZES, checkpoints=False, vllm=GIB, processes=8)
    assert [line.split()[0] for line in remedies(much)] == [
        *(
            "vllm_enable_sleep_mode",
            "gradient_checkpointing",
            "half",
            "--accelerate_config",
            "less",
            "use_peft",
            "less",
        )
    ]
    little = replace(SIZES, rows=1, trained=2**20, processes=8, stage=3)
    assert [*remedies(little)] == ["less max_completion_length"]
