"""The command of mini-swe-agent 2.4, over Chat Completions."""

import os

from examples.harnesses.task import solve

if __name__ == "__main__":
    solve(
        *("mini", "--model", "openai/policy", "--yolo", "--exit-immediately", "--task"),
        OPENAI_API_BASE=os.environ["OPENAI_BASE_URL"],
        MSWEA_CONFIGURED="true",
        MSWEA_COST_TRACKING="ignore_errors",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
