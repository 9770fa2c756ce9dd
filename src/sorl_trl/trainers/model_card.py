"""The model card beside each checkpoint: where the policy comes from, and the settings that trained it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from trl import GRPOTrainer

from sorl_trl.command_line import package_version
from sorl_trl.methods import SETTINGS, ClipPenalty
from sorl_trl.methods.method import piece_name

SORL_PAPER = {
    "title": "Stabilizing Off-Policy Training for Long-Horizon LLM Agent via Turn-Level Importance Sampling and "
    "Clipping-Triggered Normalization",
    "id": "2511.20718",
    "citation": """\
@article{li2025sorl,
    title   = {{Stabilizing Off-Policy Training for Long-Horizon LLM Agent via Turn-Level Importance Sampling and Clipping-Triggered Normalization}},
    author  = {Chenliang Li and Adel Elmahdy and others},
    year    = 2025,
    eprint  = {arXiv:2511.20718},
}""",  # noqa: E501
}
_WITHOUT_A_VALUE = re.compile(r", \w+=None|\w+=None(, )?")


def credited(trainer: Any) -> tuple[str, dict[str, str]]:
    """The name of the method and its paper, for the card. It names SORL only if the settings use a part of it."""
    name, paper = trainer._name, trainer._paper
    if paper is not SORL_PAPER:  # a subclass has its own
        return name, paper
    of_sorl = ["turn-level importance ratios"] if trainer.args.importance_sampling_level == "turn" else []
    if trainer.args.bias_norm:
        of_sorl.append("clipping-triggered normalization")
    elif any(isinstance(term, ClipPenalty) for term in trainer.method.terms):
        of_sorl.append("a gated KL penalty")
    plain = name.removeprefix("SO-")
    if not of_sorl:
        return plain, GRPOTrainer._paper if plain == GRPOTrainer._name else {}
    return f"{plain} with {of_sorl[0]}" if len(of_sorl) == 1 else name, paper


def rewrite_card(trainer: Any, readme: Path) -> None:
    """Begin TRL's card with a table of what was run, in place of a sentence whose base model may be `None`."""
    card = ModelCard.load(readme)
    method, is_ours = trainer.method, type(trainer)._paper is SORL_PAPER  # a subclass with a paper is its own method
    idle = "credit" if hasattr(trainer, "critic") else None  # a critic takes its place
    pieces = [f"{name}: {piece_name(piece)}" for name, piece in method.pieces() if name != idle]
    shown = sorted({"beta", "learning_rate"}.union(*SETTINGS.values()))  # and what named methods differ in
    settings = {name: getattr(trainer.args, name, None) for name in shown}
    info = trainer.train_dataset.info
    rows = {
        "base model": card.data.base_model or Path(trainer.model.config._name_or_path).name,
        "data set": card.data.datasets or (info.dataset_name if info.dataset_name != info.builder_name else ""),
        "trainer": f"`{type(trainer).__name__}` of sorl-trl {package_version()}",
        "rewards": ", ".join(trainer.reward_func_names),
        "named method": f"`{method.name}`: {method.source}" if method.source and is_ours else "",
        "method": f"`{_WITHOUT_A_VALUE.sub('', ', '.join(pieces))}`",
        "settings": ", ".join(f"`{name}={value!r}`" for name, value in settings.items() if value is not None),
    }
    table = "".join(f"| {name} | {said} |\n" for name, said in rows.items() if said)
    _, heading, kept = card.text.partition("## Training procedure")  # trackers, method, versions, citations
    card.text = f"\n# {card.data.model_name}\n\n| | |\n|---|---|\n{table}\n{heading}{kept}"
    card.save(readme)
