"""Every layout of a pass against one plain pass of the model over each context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from peft import PromptTuningConfig
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from sorl_trl.trainers import layouts
from sorl_trl.trainers.critic import CRITIC_ATTRIBUTE, causal_lm_of
from sorl_trl.trainers.forward import Forward, LaidOut
from sorl_trl.trainers.layouts import IN_SEGMENTS, LAYOUTS, attend_in_segments, plan_of
from tests import model_families as families
from tests.agents import build_agent
from tests.critics import build_ppo, policy_with, rollout_batch, set_head
from tests.model_families import GEMMA, GQA

WINDOW = {"sliding_window": 6}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": families.SERVED["llama"],
    "qwen2": families.SERVED["qwen2"],
    "qwen3": families.SERVED["qwen3"],
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA, **WINDOW, **MIXED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GQA, **WINDOW)),
    "gpt2": families.SERVED["gpt2"],
    "qwen3_moe": families.SERVED["qwen3_moe"],
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
SINKS = {"layer_types": ["full_attention"] * 2}
UNFOLDED: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen3_next": (lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**GQA, **LINEAR)), "linear_attention"),
    "lfm2": (lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**GQA, layer_types=["conv", "full_attention"])), "conv"),
    "gpt_oss": (
        lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**GQA, head_dim=8, num_local_experts=4, **SINKS)),
        "'eager'",
    ),
}
"""Those that do not pack, and a part of the reason."""
ROWS = [
    # prompt, then (context, tokens, is a turn)
    (5, [(0, 4, 1), (0, 3, 0), (1, 7, 0), (1, 5, 1), (0, 2, 0), (0, 4, 1), (2, 8, 0), (2, 3, 1)]),
    (7, [(0, 9, 1)]),
    (3, [(0, 2, 1), (0, 4, 0), (-1, 3, 0), (1, 6, 0), (1, 6, 1), (1, 2, 0)]),
]
"""Contexts alternate; context 1 of the last row repeats tokens."""
IN_SINGLE = {"rtol": 2e-5, "atol": 2e-5}
"""Norms of Gemma and the head of a critic are float32, and so is TRL's head."""


def rollout() -> dict[str, Tensor]:
    """TRL's batch of `ROWS`, with prompts padded on the left. A context begins like its prompt."""
    generator = torch.Generator().manual_seed(0)
    width, length = max(row for row, _ in ROWS), max(sum(part[1] for part in parts) for _, parts in ROWS) + 2
    batch = {f"prompt_{name}": torch.zeros(len(ROWS), width, dtype=torch.long) for name in ("ids", "mask")}
    names = ("completion_ids", "completion_mask", "tool_mask", "context_ids")
    batch |= {name: torch.zeros(len(ROWS), length, dtype=torch.long) for name in names}
    for row, (size, parts) in enumerate(ROWS):
        prompt = torch.randint(4, families.VOCABULARY, (size,), generator=generator)
        batch["prompt_ids"][row, width - size :], batch["prompt_mask"][row, width - size :] = prompt, 1
        at, begun = 0, {0}
        for context, count, is_turn in parts:
            own = slice(at, at + count)
            tokens = torch.randint(4, families.VOCABULARY, (count,), generator=generator)
            if abs(context) not in begun:
                tokens[: min(size, count)] = prompt[:count]
            begun.add(abs(context))
            batch["completion_ids"][row, own], batch["completion_mask"][row, own] = tokens, 1
            batch["tool_mask"][row, own], batch["context_ids"][row, own] = is_turn, context
            at += count
    return batch


BATCH = rollout()
SCORED = BATCH["tool_mask"].bool()
LENGTH = SCORED.size(1)


def texts_of(batch: dict[str, Tensor]) -> list[tuple[int, Tensor]]:
    """The row of each context, and where its tokens stand in it."""
    mask = whole(batch)[1].bool()
    contexts = torch.cat([torch.zeros_like(batch["prompt_ids"]), batch["context_ids"].abs()], 1)
    found = []
    for row in range(len(mask)):
        for context in contexts[row][mask[row]].unique():
            found.append((row, ((contexts[row] == context) & mask[row]).nonzero()[:, 0]))
    return found


def one_by_one(model: Any, value_of: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """The results of plain passes for each token: `value_of` gives (1, L) values for (1, L) ids."""
    ids, _ = whole(BATCH)
    found = {name: torch.zeros(ids.shape, dtype=torch.float64) for name in ("logps", "entropies", "values")}
    for row, places in texts_of(BATCH):
        text = ids[row, places][None]
        logps = model(input_ids=text).logits[0, :-1].double().log_softmax(-1)
        at = torch.tensor(row), places[1:]
        of_text = {"logps": logps.gather(1, text[0, 1:, None])[:, 0], "entropies": -(logps.exp() * logps).sum(-1)}
        if value_of is not None:
            of_text["values"] = value_of(text)[0, :-1].double()
        found = {name: each.index_put(at, of_text[name]) if name in of_text else each for name, each in found.items()}
    return {name: torch.where(SCORED, each[:, -LENGTH:], 0.0) for name, each in found.items()}


def whole(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The ids of prompts and completions, and their mask."""
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    return ids, mask


def laid_out(model: Any, layout: str, with_values: bool = False, scored: Tensor = SCORED) -> dict[str, Tensor]:
    """The results of a pass in a layout, in TRL's two chunks of rows."""
    ids, mask = whole(BATCH)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-LENGTH] = -100
    asked = LaidOut(model, model, [layout], scored, BATCH["context_ids"], with_values)
    outputs = [
        asked(input_ids=ids[rows], attention_mask=mask[rows], labels=labels[rows], fused_lm_head=True)
        for rows in (slice(0, 2), slice(2, 3))
    ]
    found = {"logps": torch.cat([each.log_probs for each in outputs]).double()}
    found["entropies"] = torch.cat([each.entropy for each in outputs]).double()
    found["values"] = torch.cat(asked.values).double() if with_values else torch.zeros_like(found["logps"])
    return {name: each[:, -LENGTH:] for name, each in found.items()}


def gradients(found: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Of a loss of all that a pass has found, with weights by token."""
    weights = torch.randn(3, *SCORED.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    sum((of * each).sum() for of, each in zip(weights, found.values(), strict=True)).backward()  # type: ignore[union-attr]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def detached(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in found.items()}


def with_head(model: Any, packs: bool = True) -> Any:
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if packs:
        attend_in_segments(model)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_computes_what_plain_passes_do(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """And a trainer's first pass finds that it does."""
    model = families.build(FAMILIES[family])
    plain = one_by_one(model)
    expected = gradients(plain, model)
    forward = forward_of(with_head(model, packs=False))
    found = asked(forward, model, rows=2)
    assert forward.layouts == LAYOUTS and forward.reason is None and not warnings_of(caplog)
    torch.testing.assert_close(found, detached({name: plain[name] for name in found}), **IN_SINGLE)
    for layout in LAYOUTS:
        found = laid_out(model, layout)
        torch.testing.assert_close(detached(found), detached(plain), **IN_SINGLE)
        ours = gradients(found, model)
        assert ours.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = max(gradient.abs().max().item(), 1e-6)
            torch.testing.assert_close(ours[name] / scale, gradient / scale, rtol=0, atol=1e-4, msg=name)


def critic_of(model: Any) -> Any:
    return getattr(causal_lm_of(model), CRITIC_ATTRIBUTE)


def plain_value(model: Any, kind: str, text: Tensor) -> Tensor:
    critic = critic_of(model)
    if kind == "model":
        return critic.head(critic.backbone(input_ids=text).last_hidden_state)
    if kind == "adapter":
        with critic.active():
            return critic.head(causal_lm_of(model).base_model(input_ids=text).last_hidden_state)
    hidden = causal_lm_of(model).base_model(input_ids=text).last_hidden_state
    return critic.head(hidden if kind == "trunk" else hidden.detach())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("kind", ["head", "trunk", "adapter", "model"])
def test_values_are_those_of_plain_passes(kind: str, checkpointing: bool) -> None:
    model, critic = policy_with(kind)
    model.double()
    plain = one_by_one(model, lambda text: plain_value(model, kind, text))
    assert plain["values"].std() > 0.01
    expected = gradients(plain, model)
    attend_in_segments(causal_lm_of(model))
    if kind == "model":
        attend_in_segments(critic.backbone)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layout in LAYOUTS:
        found = laid_out(model, layout, with_values=True)
        torch.testing.assert_close(detached(found), detached(plain), **IN_SINGLE)
        torch.testing.assert_close(gradients(found, model), expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# What a trainer's models can do
# ---------------------------------------------------------------------------------------------------------------------


def forward_of(model: Any, **args: Any) -> Forward:
    given = {
        "n_gpu": 1,
        "bf16": False,
        "fp16": False,
        "tf32": None,
        "process_index": 0,
        "router_replay": "none",
    } | args
    trainer = SimpleNamespace(
        model=model, ref_model=None, accelerator=Accelerator(cpu=True), args=SimpleNamespace(**given)
    )
    trainer._get_per_token_logps_and_entropies = partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer)
    return Forward(trainer)


def asked(forward: Forward, model: Any, batch: dict[str, Tensor] = BATCH, **options: Any) -> dict[str, Tensor]:
    found = forward(model, batch, entropies=True, **options)
    assert found.entropies is not None
    return {"logps": found.logps.double(), "entropies": found.entropies.double()}


def trls(trainer: Any, model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    """TRL's log-probabilities, entropies and router loss of a batch."""
    length = batch["completion_ids"].size(1)
    return GRPOTrainer._get_per_token_logps_and_entropies(trainer, model, *whole(batch), length, **options)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("sorl_trl")]


@pytest.mark.parametrize(("family", "bypassed"), [("lfm2", False), ("gpt_oss", False), ("qwen3_next", True)])
def test_these_read_padded_rows(
    family: str, bypassed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their class or config shows it; if it did not, the first pass would find out."""
    make, reason = UNFOLDED[family]
    model = families.build(make).float()
    plain = detached(one_by_one(model))
    if bypassed:
        monkeypatch.setattr("sorl_trl.trainers.forward.why_not_packed", lambda _: None)
        monkeypatch.setattr("sorl_trl.trainers.forward.attend_in_segments", lambda _: None)
        reason = "off by"
    forward = forward_of(with_head(model, packs=False))
    found = asked(forward, model)
    assert forward.layouts == ("unfolded",)
    assert forward.reason is not None and reason in forward.reason
    assert ["Results are correct" in text for text in warnings_of(caplog)] == [True]
    torch.testing.assert_close(found, {name: plain[name] for name in found}, rtol=1e-3, atol=1e-3)


def test_a_model_that_fails_without_padding_reads_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel may, that torch has and the GPU does not."""
    monkeypatch.setattr(layouts, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(layouts, "_in_one_kernel", None)
    model = families.build(FAMILIES["llama"])
    plain = detached(one_by_one(model))
    forward = forward_of(with_head(model, packs=False))
    found = asked(forward, model)
    assert (forward.layouts, forward.reason) == (("unfolded",), "it fails without padding")
    torch.testing.assert_close(found, {name: plain[name] for name in found}, **IN_SINGLE)


@pytest.mark.trains
def test_every_model_of_a_trainer_attends_in_segments(tmp_path: Path, tokenizer: Any) -> None:
    """Policy, reference and critic: one that did not would mix trajectories."""
    trainer = build_ppo(tmp_path, tokenizer, critic="model", beta=0.1)
    models = trainer.model, trainer.ref_model, trainer.critic.backbone
    assert {each.config._attn_implementation for each in models} == {IN_SEGMENTS}
    set_head(trainer)
    batch = rollout_batch(trainer)
    assert trainer._forward.layouts == LAYOUTS
    alone = [{name: each[row : row + 1] for name, each in batch.items() if name in BATCH} for row in range(4)]
    with torch.no_grad():
        values = torch.cat([trainer._forward(trainer.model, row, values=True).values for row in alone])
    kept = batch["turn_ids"][:4] >= 0
    torch.testing.assert_close(values[kept], batch["old_values"][:4][kept], **IN_SINGLE)
    assert values[kept].std() > 0.01


def test_several_gpus_of_one_process_are_refused() -> None:
    with pytest.raises(ValueError, match="One process has 2 GPUs"):
        forward_of(families.build(FAMILIES["llama"]), n_gpu=2)


def prompts_and(completions: Sequence[Sequence[int]], prompt: int = 4) -> dict[str, Tensor]:
    """Rows of the same prompt with these completions."""
    width = max(map(len, completions))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in completions])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in completions])
    prompts = torch.arange(4, 4 + prompt).expand(len(ids), prompt)
    names = "prompt_ids", "prompt_mask", "completion_ids", "completion_mask"
    return dict(zip(names, (prompts, torch.ones_like(prompts), ids, mask), strict=True))


@pytest.mark.parametrize(
    ("completions", "prompt", "shape"),
    [
        ([[5] * 9, [6] * 9], 1, (2, 10)),  # nothing to gain
        ([[5] * 9, [6] * 2], 1, (1, 2 + 9 + 2)),  # one word less is no gain
        ([[5] * 9, [6] * 9], 4, (1, 4 + 18)),  # the prompt is read once
        ([[5] * 9, [5] * 2], 1, (1, 10)),  # and so is a completion that another one begins with
    ],
    ids=["as long", "uneven", "one prompt", "one beginning"],
)
def test_the_model_reads_as_few_tokens_as_it_can(
    completions: list[list[int]], prompt: int, shape: tuple[int, ...]
) -> None:
    model = with_head(families.build(FAMILIES["llama"]), packs=False)
    forward, batch = forward_of(model), prompts_and(completions, prompt)
    forward(model, batch)  # tries layouts out
    seen: list[tuple[int, ...]] = []
    model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    forward(model, batch)
    assert seen == [shape]


def test_positions_that_depend_on_the_width_keep_it() -> None:
    """As in TRL: all rows are as wide as the batch, where frequencies follow the longest row."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = hf.LlamaConfig(**{**GQA, "max_position_embeddings": 16, "rope_parameters": rope})
    model = families.build(lambda: hf.LlamaForCausalLM(config))
    again = with_head(families.build(lambda: hf.LlamaForCausalLM(config)), packs=False)  # it remembers the longest
    forward = forward_of(with_head(model, packs=False))
    batch = {name: each for name, each in BATCH.items() if name != "context_ids"}
    found = asked(forward, model, batch)
    assert "dynamic" in str(forward.reason)
    theirs, _, _ = trls(forward._trainer, again, batch)
    torch.testing.assert_close(found["logps"], torch.where(SCORED, theirs, 0.0).double(), **IN_SINGLE)


@pytest.mark.trains
def test_prompt_tuning_is_scored_as_by_trl(tmp_path: Path) -> None:
    """Its virtual tokens stand before the prompt, so that hidden states have more columns than labels."""
    trainer = build_agent(tmp_path, peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    batch = prompts_and([[3, 5, 6], [4]])
    theirs, _, _ = trls(trainer, trainer.model, batch)
    kept = batch["completion_mask"].bool()
    torch.testing.assert_close(trainer._forward(trainer.model, batch).logps[kept], theirs[kept])


def test_the_router_loss_is_that_of_the_tokens() -> None:
    """As in TRL, where each row is a context; a config that asks for it is not heard otherwise."""
    model = with_head(families.build(FAMILIES["qwen3_moe"]), packs=False)
    forward, batch = forward_of(model), prompts_and([[5] * 9, [6] * 2])
    _, _, theirs = trls(forward._trainer, model, batch, compute_aux_loss=True)
    torch.testing.assert_close(forward(model, batch, router=True).aux_loss, theirs)
    model.config.output_router_logits = True
    assert forward(model, batch).aux_loss is None


# ---------------------------------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(B, W) ids of few words, so that texts begin alike; a mask, what is scored, and contexts, without any order."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 9))

    def numbers(least: int, most: int) -> Tensor:
        row = st.lists(st.integers(least, most), min_size=width, max_size=width)
        return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))

    mask = numbers(0, 1)
    mask[0, 0] = 1  # a batch has a token
    return numbers(1, 2), mask, numbers(0, 1).bool(), numbers(0, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(given_=batches())
def test_any_assignment_of_contexts(layout: str, given_: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Each scored token is predicted by a position that reads its context up to it, and nothing else."""
    ids, mask, scored, contexts = given_
    plan = plan_of(ids, mask, scored, contexts, [layout])
    expected, beginnings = {}, set()
    for row in range(len(ids)):
        for context in range(4):
            places = [i for i in range(ids.size(1)) if mask[row, i] and contexts[row, i] == context]
            for before, place in enumerate(places):
                beginnings.add(tuple(ids[row, places[: before + 1]].tolist()))
                if scored[row, place] and before:
                    expected[row * ids.size(1) + place] = ids[row, places[:before]].tolist(), int(ids[row, place])
    assert sorted(plan.targets.tolist()) == sorted(expected)
    if layout == "tree":  # which reads each beginning once
        assert plan.input_ids.numel() == len(beginnings)
    if not expected:
        assert plan.labels.tolist() == [[-100]]
        return
    for place, predictor, label in zip(plan.targets, plan.predictors, plan.labels[0], strict=True):
        assert (text_at(plan, int(predictor)), int(label)) == expected[int(place)]
    found = torch.arange(1.0, len(expected) + 1)
    scattered = plan.scatter(found[None], ids).flatten()
    assert scattered[plan.targets].tolist() == found.tolist()
    assert scattered.count_nonzero() == len(expected)


def text_at(plan: Any, position: int) -> list[int]:
    """What the model has read at a flat position of a plan."""
    if plan.segments is None:
        row, column = divmod(position, plan.input_ids.size(1))
        assert plan.attention_mask[row, : column + 1].all()
        return plan.input_ids[row, : column + 1].tolist()
    lengths, before = plan.segments.lengths, plan.segments.before or ((),) * len(plan.segments.lengths)
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert plan.segments.bounds.tolist() == bounds
    own = next(i for i, end in enumerate(bounds[1:]) if position < end)
    ids, places = plan.input_ids[0], plan.position_ids[0]
    whole = [i for each in before[own] for i in range(bounds[each], bounds[each + 1])]
    whole += range(bounds[own], position + 1)
    assert places[whole].tolist() == list(range(len(whole)))
    return ids[whole].tolist()
