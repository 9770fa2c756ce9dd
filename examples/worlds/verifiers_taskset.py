"""A taskset of verifiers as the agent: its own program asks the policy, and its rubric is the reward.

python -m pip install verifiers uv openai   # uv brings what verifiers' programs need, once
python -m examples.worlds.verifiers_taskset my_taskset 1000 > tasks.jsonl   # an installed package, as in `vf-eval`
sorl train --agent examples.worlds.verifiers_taskset.agent --train_questions tasks.jsonl --max_completion_length 1000 \
    --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --output_dir out
"""

import os
from functools import cache
from itertools import islice
from uuid import uuid4

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.harnesses import NullHarnessConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from examples.worlds.command import print_rows


async def agent(example, endpoint):
    """Plays one episode. `None`, which masks the trajectory, if something other than the policy fails."""
    variable = f"SORL_API_KEY_{uuid4().hex}"  # verifiers takes keys from here, and keeps such names from its programs
    os.environ[variable] = endpoint.api_key
    try:
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
        env = load_environment(settings(example["taskset"]))
        task = next(islice(env.taskset, example["index"], None))
        async with env.serving():
            episode = await env.run_episode(task, vf.ModelContext("policy", client))
    finally:
        del os.environ[variable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if episode.ok:
        return {name: each.value for trace in episode.traces for name, each in trace.rewards.items() if each}
    if any(error.type == "ProviderError" for error in errors):  # a limit of tokens, or a request that is refused
        raise RuntimeError(errors[0].message)
    return None


@cache
def settings(taskset):
    """Verifiers' chat program, which runs no code, in a process of this machine, for every role of the environment."""
    config = resolve_env_config({"taskset": {"id": taskset}})
    here = {"runtime": vf.SubprocessConfig(), "harness": NullHarnessConfig(id="null")}
    return config.model_copy(
        update={name: role.model_copy(update=here) for name, role in agent_config_fields(config).items()}
    )


def rows(taskset: str, count: int):
    found = islice(load_environment(settings(taskset)).taskset, count)
    return [{"prompt": f"{taskset} {index}", "taskset": taskset, "index": index} for index, _ in enumerate(found)]


if __name__ == "__main__":
    raise SystemExit(print_rows(rows, __doc__))
