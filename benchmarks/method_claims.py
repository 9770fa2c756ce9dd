"""What the pages of methods are about: the benchmark's rows of each, and what its source reports.

A claim is told as reported, never as reproduced. [P] was read in the paper, [C] in a public implementation, [A] in the
abstract alone, [2nd] second-hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MethodPage:
    """A page of `docs/methods`.

    Args:
        title: in tables.
        rows: names of the benchmark's rows that it is about; one that the benchmark does not have was not measured.
        reported: what the source reports, a sentence or two.
        short: the same in a few words, for the overview.
        recipes: of `recipes/`, by name; none for a switch.
        elsewhere: where else something of it was measured, a sentence with links from `docs/methods/`.
    """

    title: str
    rows: tuple[str, ...]
    reported: str
    short: str
    recipes: tuple[str, ...] = ()
    elsewhere: str = ""


_UNSAID = "The source's figures are not known to us."
METHOD_PAGES: dict[str, MethodPage] = {
    "our_defaults": MethodPage(
        "Our defaults",
        ("so_grpo", "so_ppo"),
        "There is no source: the combination is ours, and was settled with these judging seeds in view, so that the "
        "table is no test of it.",
        "none: ours",
        recipes=("so_grpo", "so_ppo"),
        elsewhere="What each part contributes is in [defaults](../../benchmarks/results/defaults.md); longer turns "
        "are in [turn length](../../benchmarks/results/turn_length.md).",
    ),
    "turns": MethodPage(
        "Turns: our second defaults",
        ("so_grpo_turn", "so_grpo_first", "so_grpo_penalty", "so_ppo_turn", "so_ppo_first"),
        "There is no source for the combination: turn ratios are SORL's, the rest is ours.",
        "none: turn ratios are SORL's, the rest is ours",
        recipes=("so_grpo_turn", "so_ppo_turn"),
        elsewhere="Longer turns are in [turn length](../../benchmarks/results/turn_length.md).",
    ),
    "sorl": MethodPage(
        "SORL as specified",
        ("so_grpo_specified", "so_ppo_specified"),
        "That turn-level ratios and clipping-triggered normalization prevent collapses of multi-turn training [A].",
        "no collapses in multi-turn training [A]",
        recipes=("so_grpo_specified", "so_ppo_specified"),
    ),
    "st_ppo": MethodPage(
        "ST-PPO and its parts",
        ("st_ppo", "s_ppo", "turn_ppo", "st_grpo"),
        "That ST-PPO and S-PPO train stably where token PPO, the only baseline, collapses; the two are nearly "
        "identical in the paper's figure 4, say the reviews. Models: Qwen2.5-1.5B and 7B [A, 2nd].",
        "stable where PPO collapses; S-PPO and ST-PPO nearly identical [A, 2nd]",
        recipes=("st_ppo", "s_ppo", "turn_ppo", "st_grpo"),
    ),
    "ppo": MethodPage(
        "PPO",
        ("ppo", "ppo_target"),
        "The paper's experiments are of control and games, not of language models. Of agents that search, the authors "
        "of SORL report collapses of token PPO, those of Search-R1++ that it is steadier than GRPO [A].",
        "collapses in search (SORL); steadier than GRPO (Search-R1++) [A]",
        recipes=("ppo",),
        elsewhere="The critic is measured in [ppo.md](../ppo.md).",
    ),
    "grpo": MethodPage(
        "GRPO",
        ("grpo", "plain", "grpo_target", "dual_clip"),
        "Mathematics in one turn, in the paper. Of agents that search, the authors of LLDS report that plain GRPO "
        "collapses within 300 steps [P].",
        "collapses in search within 300 steps (LLDS) [P]",
        recipes=("grpo",),
    ),
    "gspo": MethodPage(
        "GSPO",
        ("gspo", "gspo_authors", "gspo_length"),
        "That sequence ratios train more efficiently and more stably than token ratios, mixtures of experts above all "
        "[A].",
        "more stable and efficient than GRPO [A]",
        recipes=("gspo", "gspo_authors"),
    ),
    "loop": MethodPage(
        "LOOP",
        ("loop", "so_loop"),
        "A 32B model 9 points above o1 on AppWorld, as reported [2nd].",
        "9 points above o1 on AppWorld [2nd]",
        recipes=("loop",),
    ),
    "reinforce": MethodPage(
        "REINFORCE as in Search-R1++",
        ("reinforce",),
        "REINFORCE steadier than PPO, and PPO than GRPO; exact match .403 → .442 with 7B and .289 → .331 with 3B; F1 "
        "alone collapses into not answering [A, 2nd].",
        "steadier than PPO and GRPO; EM .403 → .442 with 7B [A, 2nd]",
        recipes=("reinforce",),
    ),
    "group_filters": MethodPage(
        "Filters of groups",
        ("starpo_s", "top_k", "top_p", "refill", "so_top_p", "so_refill"),
        _UNSAID,
        "not known to us",
        recipes=("starpo_s", "dapo", "ragen2"),
    ),
    "minirl": MethodPage(
        "MiniRL",
        ("minirl",),
        "On-policy, the engine correction is vital and length normalization hurts; off-policy, the clipping is needed "
        "too [P].",
        "length normalization hurts; off-policy needs clipping [P]",
        recipes=("minirl",),
    ),
    "seeupo": MethodPage(
        "SeeUPO",
        ("seeupo",),
        "43 to 55 % more, relatively, with Qwen3-14B, as reported [2nd].",
        "43 to 55 % more, relatively [2nd]",
        recipes=("seeupo",),
    ),
    "igpo": MethodPage(
        "IGPO",
        ("igpo", "so_igpo"),
        "An average F1 of 60.2 over GRPO's 51.9 with a 7B model [P].",
        "F1 51.9 → 60.2 over GRPO with 7B [P]",
        recipes=("igpo",),
    ),
    "gigpo": MethodPage(
        "GiGPO",
        ("gigpo", "so_gigpo", "so_steps", "so_gamma"),
        _UNSAID + " The formula was read in its public code.",
        "not known to us",
        recipes=("gigpo",),
    ),
    "llds": MethodPage(
        "LLDS",
        ("llds", "so_llds"),
        "On Search-R1's setting, exact match over seven sets: GRPO .312 → .360 with a 3B base model and .350 → .480 "
        "with 7B; plain GRPO collapses within 300 steps; a coefficient of 0.01 only delays that [P].",
        "EM .312 → .360 with 3B, .350 → .480 with 7B over GRPO [P]",
        recipes=("llds",),
    ),
    "engine_mismatch": MethodPage(
        "Engine mismatch per turn",
        (),
        "Public trainers ship such corrections (verl, ROLL, SkyRL, slime) [C]; MiniRL's authors report that one is "
        "vital on-policy [P].",
        "vital on-policy (MiniRL) [P]",
        elsewhere="The stability benchmark samples with the trainer's own weights and has no mismatch. What a real "
        "engine's is, and what each correction makes of it, is in "
        "[engine mismatch](../../benchmarks/results/engine_mismatch.md).",
    ),
    "void_trajectories": MethodPage(
        "Void trajectories",
        ("void", "so_void"),
        _UNSAID + " The mask was read in a public implementation.",
        "not known to us",
        recipes=("void_trajectories",),
    ),
    "double_sided_clip": MethodPage(
        "Double-sided clip",
        ("double_sided", "so_double"),
        _UNSAID,
        "not known to us",
        recipes=("double_sided_clip",),
    ),
}
"""File name in `docs/methods`, without its ending, to the page; in the order of the overview."""
