"""Codex CLI 0.171, over Responses."""

import os

from examples.harnesses.task import solve

if __name__ == "__main__":
    provider = f'{{name="sorl", base_url="{os.environ["OPENAI_BASE_URL"]}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    settings = [f"model_providers.sorl={provider}", "model_provider=sorl", "features.multi_agent=false", "web_search=disabled"]
    words = [word for each in settings for word in ("-c", each)]
    solve("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--model", "policy", *words)
