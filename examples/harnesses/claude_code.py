"""Claude Code 2.1, over Anthropic's Messages API, with three of its tools."""

from examples.harnesses.task import solve

TOOLS = "Bash,Edit,Read"

if __name__ == "__main__":
    solve(
        *("claude", "--tools", TOOLS, "--allowed-tools", TOOLS, "--model", "policy", "--print"),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )
