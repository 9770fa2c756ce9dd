"""Qwen Code 0.24, over Chat Completions."""

from examples.harnesses.task import solve

if __name__ == "__main__":
    solve("qwen", "--yolo", "--auth-type", "openai", "--model", "policy", "--prompt", QWEN_TELEMETRY_ENABLED="false")
