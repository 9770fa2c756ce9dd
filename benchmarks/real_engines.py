"""Engines on a pretrained language model: do they sample the same, and how far off are they?

    make .venv-vllm/.installed
    .venv-vllm/bin/python -m benchmarks.real_engines --run runs/train-lm --untaught models/smollm2-135m

All ask the policy that `make train-lm` leaves in RUN/warm-start the questions of RUN/world. vLLM runs on the CPU, in
this process and as a server. Writes `real_engines.json` and `.md` in `benchmarks/results`.

- *The same tokens*: the likeliest ones, in 100 turns, against transformers' `generate` in float32. Where they differ,
  the margin is that between the two best logits at the first token that does.
- *How far off*: 64 sampled trajectories an engine, scored by the trainer in float32 and under bfloat16 autocast.
- *What corrections keep* at those differences.
- *A probe of the server*: what rounding does to it, and what it finds where the trainer has other weights: those of
  the model before it was taught to search.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from examples.quickstart import CORPUS_FILE, EVALUATION_FILE
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import GenerationConfig

from benchmarks.common import RESULTS, table
from sorl_trl.cli.arguments import parse_arguments
from sorl_trl.cli.build import build_trainer
from sorl_trl.command_line import Parser, run_command
from sorl_trl.ops import turn_layout, turn_mismatch, within
from sorl_trl.rollout import Collector, Engine, SlotEngine, TurnEnd, assemble, generate_turns, model_engine
from sorl_trl.trainers.vllm_policy import TOLERANCE, PolicyGeneration, ServerPolicy
from sorl_trl.types import Trajectory, Turn

FILE = RESULTS / "real_engines.json"
ENGINES = {
    "lockstep": "`model.generate` in lock-step",
    "slots": "slots",
    "colocate-float32": "vLLM in the process, float32",
    "server-float32": "vLLM as a server, float32",
    "colocate-bfloat16": "vLLM in the process, bfloat16",
    "server-bfloat16": "vLLM as a server, bfloat16",
}
TURNS, TRAJECTORIES, WINDOW = 100, 64, 512
TRUNCATED_AT, TURN_MASK, TRLS_CAP = 2.0, (0.8, 1.2), 3.0
PERCENTILES = (50, 90, 99, 100)


class Bench:
    """The policy, its trainer, and the questions."""

    def __init__(self, run: Path, untaught: Path, folder: Path) -> None:
        self.policy, self.untaught = run / "warm-start", untaught
        paths = {"model_name_or_path": self.policy, "output_dir": folder / "out", "report_to": "none"}
        paths |= {"train_questions": run / "world" / EVALUATION_FILE, "corpus": run / "world" / CORPUS_FILE}
        given = [word for name, value in paths.items() for word in (f"--{name}", str(value))]
        recipe = ["--config", "smollm2_search", "--eval_questions", "", "--collapse_guard", "off"]
        self.trainer: Any = build_trainer(parse_arguments([*recipe, *given]))
        self.folder = folder
        questions = [self.trainer.train_dataset[i]["prompt"] for i in range(TRAJECTORIES)]
        rollout = self.trainer.rollout_func.__wrapped__
        setup = rollout.setup(self.trainer)
        self.collector: Collector = rollout.collector(setup)
        self.prompts: list[list[int]] = setup.encode(questions)
        self.end = TurnEnd(self.trainer._tokenizer, self.collector.protocol.stop_strings, self.trainer.eos_token_ids)

    @contextmanager
    def engine(self, name: str, greedy: bool) -> Iterator[Engine]:
        """One that samples from the policy, and is shut down afterwards."""
        kind, _, dtype = name.partition("-")
        if not dtype:
            config: Any = GenerationConfig(do_sample=not greedy, top_k=0)
            with torch.no_grad():
                engine = model_engine(self.trainer.model.eval(), self.end, config, kind)
                if isinstance(engine, SlotEngine):
                    engine.logprobs_at = 1.0
                yield engine
            return
        from sorl_trl.agents.vllm import vllm_engine

        with self._vllm(kind, dtype, 0.0 if greedy else 1.0) as vllm:
            yield vllm_engine(vllm, self.end)

    @contextmanager
    def _vllm(self, kind: str, dtype: str, temperature: float) -> Iterator[Any]:
        """TRL's wrapper around a vLLM that has read the policy from its folder."""
        from tests.vllm import servers, shims

        os.environ.update(shims.ENVIRONMENT)
        shims.KV_CACHE_BYTES = 2**30
        shims.install()
        from trl.generation import vllm_generation
        from vllm import LLM

        def start(**arguments: Any) -> Any:
            del arguments["enable_sleep_mode"]
            arguments |= {"dtype": dtype, "enforce_eager": True, "kv_cache_memory_bytes": shims.KV_CACHE_BYTES}
            llm = LLM(**arguments)
            llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill = False
            return llm

        vllm_generation.LLM = start
        wrap = partial(
            PolicyGeneration,
            self.trainer.model,
            self.trainer.accelerator,
            self.trainer._tokenizer,
            temperature=temperature,
        )
        if kind == "server":
            with servers.serving(self.policy, WINDOW, self.folder / "server.txt", dtype) as server:
                yield wrap(mode="server", server_base_url=server.url)
            return
        vllm = wrap(max_model_length=WINDOW, max_num_seqs=TURNS, gpu_memory_utilization=0.3)
        try:
            yield vllm
        finally:
            vllm.llm.llm_engine.engine_core.shutdown()
            gc.collect()

    def rollout(self, engine: Engine) -> list[Trajectory]:
        torch.manual_seed(0)
        return self.collector.collect(self.prompts, engine)

    def contexts(self, trajectories: Sequence[Trajectory]) -> list[tuple[int, ...]]:
        """What stood before each turn, of the first so many turns."""
        found = []
        for trajectory in trajectories:
            before = trajectory.prompt_ids
            for segment in trajectory.segments:
                if isinstance(segment, Turn):
                    found.append(tuple(before))
                before = (*before, *segment.token_ids)
        return found[:TURNS]

    def greedy_turns(self, name: str, contexts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        with self.engine(name, greedy=True) as engine:
            engine.open(len(contexts))
            try:
                limits = [self.collector.limits.max_turn_tokens] * len(contexts)
                return [each.token_ids for each in generate_turns(engine, contexts, limits)]
            finally:
                engine.close()

    @torch.no_grad()
    def margin(self, ids: Sequence[int]) -> float:
        """Between the two best logits after these tokens."""
        best = self.trainer.model(torch.tensor([ids])).logits[0, -1].topk(2).values
        return float(best[0] - best[1])

    @torch.no_grad()
    def mismatch(self, trajectories: Sequence[Trajectory], autocast: bool) -> tuple[Tensor, Tensor]:
        """(B, T) d_t of each sampled token, trainer less engine, and turn ids."""
        rows = []
        for each, laid in zip(trajectories, assemble(trajectories), strict=True):
            ids = torch.tensor([[*each.prompt_ids, *laid.completion_ids]])
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = self.trainer.model(ids, logits_to_keep=len(laid.completion_ids) + 1).logits[0, :-1].float()
            scored = -cross_entropy(logits, torch.tensor(laid.completion_ids), reduction="none")
            assert laid.logprobs is not None
            rows.append((scored - torch.tensor(laid.logprobs), torch.tensor(laid.turn_ids)))
        width = max(len(turns) for _, turns in rows)
        differences = torch.stack([pad(row, (0, width - len(row))) for row, _ in rows])
        turn_ids = torch.stack([pad(turns, (0, width - len(turns)), value=-1) for _, turns in rows])
        return torch.where(turn_ids >= 0, differences, 0.0), turn_ids

    def probes(self, dtype: str, weights: Path) -> list[float]:
        """How far a server's probes are off a trainer with these weights, one probe a prompt."""
        trainer = self.trainer
        other = type(trainer.model).from_pretrained(weights, dtype="float32").state_dict()
        own = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        with self._vllm("server", dtype, 1.0) as trainer.vllm_generation:
            policy = ServerPolicy(trainer)
            trainer.model.load_state_dict(other)
            try:
                return [policy.difference(policy.probe(ids, seed)) for seed, ids in enumerate(self.prompts)]
            finally:
                trainer.model.load_state_dict(own)
                policy.close()


def agreement(bench: Bench) -> dict[str, Any]:
    """How many of 100 greedy turns are those of lock-step, and how close the others were to being so."""
    with bench.engine("lockstep", greedy=True) as engine:
        contexts = bench.contexts(bench.rollout(engine))
    expected = bench.greedy_turns("lockstep", contexts)
    found = {}
    for name in list(ENGINES)[1:]:
        turns = bench.greedy_turns(name, contexts)
        margins = []
        for context, ours, theirs in zip(contexts, expected, turns, strict=True):
            if ours != theirs:
                pairs = zip(ours, theirs, strict=False)
                # Where one of them is the beginning of the other, they differ behind its end.
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
                margins.append(bench.margin([*context, *ours[:same]]))
        found[name] = {"turns": len(turns), "equal": len(turns) - len(margins), "margins": margins}
        print(name, found[name], flush=True)
    return found


def differences(bench: Bench) -> dict[str, Any]:
    """Percentiles of the difference of log-probabilities, and what corrections make of it."""
    found = {}
    for name in list(ENGINES)[1:]:  # `generate` reports none
        with bench.engine(name, greedy=False) as engine:
            trajectories = bench.rollout(engine)
        for scoring in ("float32", "bfloat16"):
            row = spread(*bench.mismatch(trajectories, autocast=scoring == "bfloat16"))
            found[f"{name}/{scoring}"] = row
            print(name, scoring, row, flush=True)
    return found


def probes(bench: Bench) -> dict[str, Any]:
    """How far probes of the server are off the weights that it has, and off those of the untaught model."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        for whose, weights in {"its own": bench.policy, "untaught": bench.untaught}.items():
            found[f"{dtype}/{whose}"] = sorted(bench.probes(dtype, weights))
            print(dtype, whose, found[f"{dtype}/{whose}"], flush=True)
    return found


def spread(difference: Tensor, turn_ids: Tensor) -> dict[str, Any]:
    turns = turn_layout(turn_ids)
    tokens = difference[turns.loss_mask].abs()
    ratios = turn_mismatch(difference, turns)[turns.turn_mask.bool()]
    sequences = difference.sum(dim=1).exp()
    return {
        "tokens": len(tokens),
        "of_token": [float(tokens.quantile(q / 100)) for q in PERCENTILES],
        "of_turn": [float((ratios - 1).abs().quantile(q / 100)) for q in PERCENTILES],
        "turn_truncate_cuts": float((ratios > TRUNCATED_AT).float().mean()),
        "turn_mask_keeps": float(within(ratios, *TURN_MASK).float().mean()),
        "sequence_mask_keeps": float((sequences <= TRLS_CAP).float().mean()),
        "sequence_ratios": [float(sequences.min()), float(sequences.max())],
    }


def report(measured: dict[str, Any]) -> str:
    percentiles = ["largest" if q == 100 else f"{q} %" for q in PERCENTILES]
    agreed = [
        [ENGINES[name], str(row["turns"]), str(row["equal"]), ", ".join(f"{x:.4f}" for x in row["margins"]) or "–"]
        for name, row in measured["agreement"].items()
    ]
    apart, kept, probed = [], [], []
    for key, row in measured["differences"].items():
        name, scoring = key.split("/")
        apart.append([ENGINES[name], scoring, *(f"{x:.1e}" for x in (*row["of_token"], *row["of_turn"]))])
        shares = (f"{row[x]:.1%}" for x in ("turn_truncate_cuts", "turn_mask_keeps", "sequence_mask_keeps"))
        kept.append([ENGINES[name], scoring, *shares, "{:.2f} to {:.2f}".format(*row["sequence_ratios"])])
    for key, row in measured["probes"].items():
        figures = (f"{x:.1e}" for x in (row[0], row[len(row) // 2], row[-1]))
        probed.append([*key.split("/"), str(len(row)), *figures])
    columns = ["engine", "trainer", *(f"{of}: {each}" for of in ("token", "turn") for each in percentiles)]
    keep = ["`turn_truncate` at 2 cuts", "`turn_mask` .8 to 1.2 keeps", "`sequence_mask` at 3 keeps"]
    return REPORT.format(
        agreed=table(["engine", "turns", "equal to lock-step", "margins where not"], agreed),
        apart=table(columns, apart),
        kept=table(["engine", "trainer", *keep, "ratios of trajectories"], kept),
        tolerance=TOLERANCE,
        probed=table(["server", "weights of the trainer", "probes", "least", "median", "largest"], probed),
    )


REPORT = """# Engines on SmolLM2-135M-Instruct

## The same tokens

{agreed}
## How far engine and trainer are apart

Percentiles of the difference of a token's log-probabilities, and of how far the ratio of a turn is off 1.

{apart}
## What corrections keep

{kept}
## A probe of the server

Nats that its log-probabilities are off the trainer's. A run ends at more than {tolerance}.

{probed}"""


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/train-lm"), help="folder with a warm start and a world")
    parser.add_argument("--untaught", type=Path, default=Path("models/smollm2-135m"), help="the model before that")
    parser.add_argument("parts", nargs="*", help="of: agreement, differences, probes; all, if none is named")
    arguments = parser.parse_args(words)
    with TemporaryDirectory() as folder:
        bench = Bench(arguments.run, arguments.untaught, Path(folder))
        parts = {"agreement": agreement, "differences": differences, "probes": probes}
        measured = json.loads(FILE.read_text()) if FILE.is_file() else {}
        for name in arguments.parts or parts:
            measured[name] = parts[name](bench)
            FILE.write_text(json.dumps(measured) + "\n")
    FILE.with_suffix(".md").write_text(report(measured))


if __name__ == "__main__":
    sys.exit(run_command(main))
