"""opencode 1.18, over Chat Completions. It asks for a title of the session beside the task: `--title` says it."""

import json
import os

from examples.harnesses.task import solve

if __name__ == "__main__":
    options = {"baseURL": os.environ["OPENAI_BASE_URL"], "apiKey": os.environ["OPENAI_API_KEY"]}
    models = {"policy": {"tool_call": True, "limit": {"context": 131072, "output": 2048}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    config = {"provider": {"sorl": provider}, "autoupdate": False, "share": "disabled", "permission": "allow"}
    config["compaction"] = {"auto": False}
    solve(
        *("opencode", "run", "--pure", "--model", "sorl/policy", "--title", "task"),
        OPENCODE_CONFIG_CONTENT=json.dumps(config),
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )
