"""Codex CLI 0.171, over Responses."""

import os

from examples.harnesses.task import solve

if __name__ == "__main__":
    settings = {
        "model_provider": "sorl",
        "model_providers.sorl.name": "sorl",
        "model_providers.sorl.base_url": os.environ["OPENAI_BASE_URL"],
        "model_providers.sorl.env_key": "OPENAI_API_KEY",
        "model_providers.sorl.wire_api": "responses",
    }
    words = [word for name, value in settings.items() for word in ("-c", f'{name}="{value}"')]
    solve(
        "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "policy", *words
    )
