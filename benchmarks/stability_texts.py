"""What the stability report says besides its tables."""

from __future__ import annotations

HEADER = """# Does it hold? Many short runs under stress

Written by `python -m benchmarks.stability` from the metrics of {runs:,} runs of one thread each, {seconds:,.0f} CPU
seconds in all. Every number of a result table is in `stability.json` too, infinity as 1e308.

**Worlds**, each with its regimes, and the policies that start in it. Turns and their tokens are those of the first
rollout (`rollout/turns_per_trajectory`, `rollout/tokens_per_turn`).

{worlds}

**SORL and what we add.** "As specified" is the form of the note on SORL: arithmetic turn ratios, a symmetric clip
range, the penalty (`docs/paper_to_code.md`). "Geometric" is that with the other mean; "ST-" is turn ratios with the
bias norm, for which there is more evidence. A lower range of .05 ("narrow"), a range that narrows with the length of
what it clips ("/ √length", "/ length") and a target KL are ours, no part of SORL. "First defaults" are turn ratios,
the penalty, the first and the last of them; "turns" are turn ratios with / √length and a target KL, our second
defaults; "our defaults" are sequence ratios, as GSPO's, with / length and a target KL.

**Final EM** of a run is the mean over the evaluations after its last five rollouts, on a world that nobody trained
on, its answers sampled or greedy. **Best sampled EM** is that of its best evaluation, a single one.

**A run has collapsed** if its final sampled EM is below the sampled EM of the policy it started from, or below half
of its own best evaluation. A run that died (of weights that are not numbers, say) has collapsed with an EM of 0. This
was fixed before any run.

It is blind to a peak between two of the few evaluations before the last five rollouts, and the start was evaluated
once, on 200 questions (standard error about .03): a run that ends near its start may fall on either side.

**Harnesses.** Runs were made with three versions of the benchmark's code, whose evaluations draw other random numbers:
the first, marked ¹, and the second, ², with the same ones in every evaluation of every run, the third, ³, with others
after each rollout. With the same ones, the error of a sampled EM (standard error about .03 on 200 questions) is common
to all runs of the harness: it cancels between rows of one harness, and does not between rows of two.
Differences are of runs of one harness, paired by seed: "–" where a row and its baseline have none in common.
`defaults.md` (`python -m benchmarks.defaults_report`) has those between the rows nearest to the defaults, and what two
harnesses differ by.

**The other columns.** Clip fraction: share of tokens outside the method's own clip range (methods with different
ranges do not compare), mean over rollouts and runs. KL to the
old policy, nats per token: median over a run's rollouts of the median over a rollout's updates, then over runs; and
the largest of any update of any run. Likewise the max gradient norm, before clipping (PPO
methods: of policy and critic together), and the smallest and largest
turn ratio, by the method's own mean over the tokens of a turn, geometric where it has none. "–": not measured.

**Intervals** are 95 % percentile bootstrap intervals over seeds ({resamples:,} resamples, fixed seed); over so few
seeds they are too narrow rather than too wide. **p** is exact and two-sided: all ways to flip the signs of the
differences to the baseline (GRPO or PPO, by family, in the same table unless the column says "tuned"), paired by
seed. With five seeds no p can be below 2/32 = 0.0625, with eight 2/256 = 0.0078. Nothing is corrected for the number
of comparisons.

**Seeds.** Those that chose each method's learning rate, by the mean final sampled EM (of equals, the lowest), and all
other settings: {choosing}; they enter no result. The second was asked only about learning rates within {margin:g} of
the best on the first. Those that judged: {judging}. They chose no setting of any method; but which of the
methods are our defaults today was decided with their runs in questions and in hunts with reuse in view, so that for
this choice they are no test. A seed sets the world, the warm-started policy and the random numbers. Where a method's
best learning rate is the common one, both tables show the same runs, marked "= common".
"""
OVERVIEW = "Final sampled EM at the common learning rate with its interval, and how many runs collapsed."
CHOOSING = (
    "Mean final sampled EM over the choosing seeds, and how many runs collapsed; of one run where the first seed left"
    " no doubt. The chosen one is bold; † is the edge of what was tried: the best may lie beyond."
)
