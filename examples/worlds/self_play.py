"""A two-player game of TextArena in which the policy plays both sides, and no side reads what the other is told.

python -m pip install textarena openai
python -m examples.worlds.textarena_game KuhnPoker-v0 1000 --players 2 > games.jsonl
sorl train --agent examples.worlds.self_play.self_play --train_questions games.jsonl \
    --rewards examples.worlds.self_play.by_player --method dr_mas --max_completion_length 4000 \
    --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --output_dir out
"""

from openai import AsyncOpenAI

from examples.worlds.textarena_table import Table


async def self_play(example, endpoint):
    """Each player is an agent (`Turn.agent`) with a context of its own. Returns the rewards by player."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    table, over, contexts = Table(example["game"], example["seed"], players=2), False, {}
    while not over:
        player, news = table.look()
        context = contexts.setdefault(player, [])
        context.append({"role": "user", "content": news})
        reply = await client.chat.completions.create(model=f"player_{player}", messages=context)
        context.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        over = table.move(context[-1]["content"])
    rewards, _ = table.end()
    return {f"player_{player}": reward for player, reward in rewards.items()}


def by_player(trajectory, agent_rewards, **_):
    """Rewards of turns that make the return of each turn its own player's reward, where a sum would be zero."""
    return [
        None if rewards is None else _differences([rewards.get(turn.agent, 0.0) for turn in each.turns])
        for each, rewards in zip(trajectory, agent_rewards, strict=True)
    ]


def _differences(own):
    return [now - after for now, after in zip(own, [*own[1:], 0.0], strict=True)]
