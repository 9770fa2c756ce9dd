"""A tiny policy, and a warm start: it imitates a noisy expert until it searches and answers, though badly."""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import WhitespaceSplit
from tqdm.auto import trange
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from sorl_trl.qa import Question, build_prompt_rows
from sorl_trl.rollout import Collector, RolloutLimits
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.search import BM25Index

from .expert import (
    HASTY_NOISE,
    LIMITS,
    PLAIN_LIMITS,
    PLAIN_TEMPLATE,
    PROMPT_TEMPLATE,
    PROTOCOL,
    SURE_NOISE,
    THINKING_LIMITS,
    UNKNOWN,
    ExpertNoise,
    Hasty,
    ScriptedExpert,
    Thinker,
)
from .world import CORPUS_FILE, World

_IGNORED_LABEL = -100
PAD, EOS, UNK = "[PAD]", "[EOS]", "[UNK]"
TAGS = tuple(f"<{slash}{name}>" for name in ("search", "information", "answer") for slash in ("", "/"))


@dataclass(frozen=True)
class PolicyConfig:
    """The size of a Llama with tied embeddings. Ours: it learns to copy the atlas's names in 15 CPU-seconds."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4


def train_tokenizer(worlds: Sequence[World], texts: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Make a word-level tokenizer of all words of the worlds and of `texts`, with each protocol tag as one token."""
    return word_tokenizer((*_texts(worlds), *texts), TAGS)


def word_tokenizer(texts: Iterable[str], tags: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Make a word-level tokenizer of all words in the texts, lower-cased, with each tag as one token.

    Decoding puts one space between any two tokens.
    """
    words = sorted({word for text in texts for word in text.lower().split()})
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNK, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    # Not special: trainers skip special tokens when they decode for their logs, which must still show the actions.
    wrapped.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return wrapped


def make_policy(
    tokenizer: PreTrainedTokenizerFast,
    config: PolicyConfig,
    seed: int,
    positions: int = 2 * (LIMITS.max_trajectory_tokens or 0),
) -> LlamaForCausalLM:
    """Make a randomly initialised Llama in evaluation mode. The global random state stays as it was.

    `positions` is how many tokens it can read, prompt and trajectory together.
    """
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        # Larger than usual (ours): if names differ from the first step on, copying is learnt twice as fast.
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama)
    model.eval()
    return model


def _texts(worlds: Sequence[World]) -> Iterable[str]:
    yield PROMPT_TEMPLATE.format(question="")
    yield from (UNKNOWN, PROTOCOL.no_results, PROTOCOL.search_failed, PROTOCOL.invalid_feedback)
    for world in worlds:
        yield from (passage.text for passage in world.passages)
        yield from (question.question for question in (*world.train, *world.evaluation))
        yield from (word for relation in world.relations for word in (relation.keyword, relation.noun))


@dataclass(frozen=True)
class WarmStartConfig:
    """How to warm-start a policy. The defaults (ours) leave something to learn: see `ExpertNoise`."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    noise: ExpertNoise = field(default_factory=ExpertNoise)
    expert: Callable[..., ScriptedExpert] = ScriptedExpert
    """Makes the expert that is imitated, from the arguments of `ScriptedExpert`."""
    limits: RolloutLimits = LIMITS
    """The limits of the expert's trajectories."""
    words: str = ""
    """Words of the expert's that neither the worlds nor the protocol contain."""
    prompt_template: str = PROMPT_TEMPLATE
    chat: bool = False
    """Whether prompts are messages, for a tokenizer with a chat template."""
    trajectories: int = 12000
    """How many trajectories the expert makes, divided equally among the practice worlds."""
    steps: int = 800
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    stratified: bool = False
    """See `imitate`."""
    seed: int = 0

    def prompts(
        self, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]
    ) -> dict[tuple[int, ...], Question]:
        """Map each question's prompt, as token ids, to the question, in the order of the questions."""
        rows = build_prompt_rows(questions, self.prompt_template, self.chat)
        prompts = RolloutSetup(tokenizer).encode([row["prompt"] for row in rows])
        return dict(zip(map(tuple, prompts), questions, strict=True))

    def make_expert(self, tokenizer: PreTrainedTokenizerBase, world: World) -> ScriptedExpert:
        """Make the expert that answers a world's train questions."""
        return self.expert(tokenizer, world.relations, self.prompts(tokenizer, world.train), self.noise, self.seed)


THINKING = WarmStartConfig(
    expert=Thinker,
    noise=HASTY_NOISE,
    limits=THINKING_LIMITS,
    words="<think> </think> i need the this is , now done nothing",
    steps=1200,
)
"""The quickstart's: room for thoughts, and more steps, because longer turns separate a name from its copy."""
LANGUAGE_MODEL = WarmStartConfig(
    expert=Hasty,
    noise=SURE_NOISE,
    limits=PLAIN_LIMITS,
    prompt_template=PLAIN_TEMPLATE,
    chat=True,
    trajectories=192,
    steps=24,
    batch_size=8,
    learning_rate=5e-5,
    warmup_steps=2,
    stratified=True,  # with few batches, chance would decide how many examples search twice
)
"""For a pretrained model with a chat template. It learns the protocol from some 200 examples in plain English."""


@dataclass(frozen=True)
class Example:
    """A prompt with its completion. `labels` are the policy's token ids, and −100 elsewhere."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]


def warm_start(
    world: World, practice: Sequence[World], cache: str | Path, config: WarmStartConfig | None = None, model: str = ""
) -> Path:
    """Train a policy on the expert's trajectories in the `practice` worlds, or take it from the folder `cache`.

    The cache's key is a hash of all inputs. A folder of the cache is complete, because it gets its name last.

    Args:
        world: The world where the policy will be used. It only contributes words to the tokenizer.
        practice: The worlds whose train questions the expert answers, at least one. If they have other facts, the
            policy has not seen those of `world`.
        cache: A folder, which is made if it is missing.
        config: How to make the policy, the expert and the training.
        model: A pretrained model to teach, by its folder or Hub id, instead of a tiny policy with words of its own.

    Returns:
        A folder that `AutoModelForCausalLM` and `AutoTokenizer` load.
    """
    config = config or WarmStartConfig()
    target = Path(cache) / f"warm-start-{_cache_key(world, practice, config, model)}"
    if target.is_dir():
        return target
    if model:
        policy, tokenizer = _pretrained(model)
    else:
        tokenizer = train_tokenizer([world, *practice], [config.words])
        policy = make_policy(tokenizer, config.policy, config.seed, 2 * (config.limits.max_trajectory_tokens or 0))
    share = -(-config.trajectories // len(practice))
    examples = [example for part in practice for example in expert_examples(part, tokenizer, share, config)]
    how = (config.steps, config.batch_size, config.learning_rate, config.seed)
    imitate(policy, examples, *how, warmup_steps=config.warmup_steps, stratified=config.stratified)
    return store_policy(policy, tokenizer, target)


def _pretrained(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in float32 with its tokenizer.

    Embeddings that are more than half of the model stay as they are: it knows the words, and their gradient and
    optimizer state would take more memory than all the rest.
    """
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    if 2 * sum(weight.numel() for weight in embeddings) > model.num_parameters():
        for weight in embeddings:
            weight.requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(name)


def expert_examples(
    world: World, tokenizer: PreTrainedTokenizerBase, number: int, config: WarmStartConfig
) -> list[Example]:
    """Let the expert answer `number` of the world's train questions, cycling through them if there are fewer."""
    prompts = [*islice(cycle(config.prompts(tokenizer, world.train)), number)]
    expert = config.make_expert(tokenizer, world)
    with tempfile.TemporaryDirectory() as directory:
        corpus = world.write(directory) / CORPUS_FILE
        index = BM25Index.build(corpus, Path(directory) / "index", show_progress=False)
        trajectories = Collector(tokenizer, index, PROTOCOL, config.limits).collect(prompts, expert)
    return [
        example_of(trajectory.prompt_ids, trajectory.completion_ids, trajectory.env_mask)
        for trajectory in trajectories
    ]


def imitate(
    model: PreTrainedModel,
    examples: Sequence[Example],
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    warmup_steps: int = 50,
    stratified: bool = False,
) -> None:
    """Minimise the cross-entropy of what the expert wrote. Prompts and observations are not trained on.

    With `stratified`, each batch has its share of short and of long examples; otherwise it is a random draw.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps, warmup_steps))
    rng = random.Random(f"batches/{seed}")
    model.train()
    progress = trange(steps, desc="Warm start", unit="step")
    for _ in progress:
        loss = _loss(model, _draw(examples, batch_size, rng) if stratified else rng.choices(examples, k=batch_size))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    model.eval()


def _draw(examples: Sequence[Example], batch_size: int, rng: random.Random) -> list[Example]:
    """Sort the examples by length, cut them into `batch_size` equal parts, and draw one from each."""
    by_length = sorted(examples, key=lambda example: len(example.input_ids))
    share = len(examples) / batch_size
    return [by_length[int((i + rng.random()) * share)] for i in range(batch_size)]


def _rate(step: int, steps: int, warmup_steps: int) -> float:
    """The share of the learning rate: a short warm-up, constant up to the middle, then linear to zero."""
    return min(1.0, (step + 1) / warmup_steps, 2 * (1 - step / steps))


def example_of(prompt_ids: Sequence[int], completion_ids: Sequence[int], env_mask: Sequence[int]) -> Example:
    """Make an example from a trajectory, whose `env_mask` is 1 on the policy's tokens and 0 on observations."""
    labels = [token if kept else _IGNORED_LABEL for token, kept in zip(completion_ids, env_mask, strict=True)]
    return Example((*prompt_ids, *completion_ids), (*[_IGNORED_LABEL] * len(prompt_ids), *labels))


def _loss(model: PreTrainedModel, batch: Sequence[Example]) -> torch.Tensor:
    """Mean negative log-likelihood over the labelled tokens of the batch, in nats.

    Only labelled tokens get logits, because the vocabulary is far wider than the model.
    """
    width = max(len(example.input_ids) for example in batch)
    input_ids = torch.tensor([(*row.input_ids, *[0] * (width - len(row.input_ids))) for row in batch])
    attention_mask = torch.tensor([[1] * len(row.input_ids) + [0] * (width - len(row.input_ids)) for row in batch])
    labels = torch.tensor([(*row.labels, *[_IGNORED_LABEL] * (width - len(row.labels))) for row in batch])[:, 1:]
    hidden = model.base_model(input_ids, attention_mask=attention_mask).last_hidden_state[:, :-1]
    labelled = labels != _IGNORED_LABEL
    head: torch.nn.Module = model.get_output_embeddings()
    return torch.nn.functional.cross_entropy(head(hidden[labelled]), labels[labelled])


def _cache_key(world: World, practice: Sequence[World], config: WarmStartConfig, model: str) -> str:
    """Hash the inputs, which are frozen data whose `repr` shows their whole content."""
    setting = (PROTOCOL, torch.__version__, transformers.__version__)
    return hashlib.sha256(repr((world, tuple(practice), config, model, setting)).encode()).hexdigest()[:16]


def store_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path) -> Path:
    """Write model and tokenizer into the folder `target` at once, or keep it if another process was faster."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        staging = Path(folder) / target.name
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target
