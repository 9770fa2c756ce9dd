"""Claude Code 2.1, over Anthropic's Messages API."""

from examples.harnesses.task import solve

if __name__ == "__main__":
    solve(
        *("claude", "--tools", "Bash,Edit,Read", "--model", "policy", "--dangerously-skip-permissions", "--print"),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
        IS_SANDBOX="1",
    )
