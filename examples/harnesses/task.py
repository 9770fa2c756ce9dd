"""A coding task in a temporary folder, for harnesses that are commands: each script beside this one names one.

PATH=$PATH:$PWD/.harnesses/node_modules/.bin sorl train --agent_command "python -m examples.harnesses.opencode" \
    --train_questions examples/harnesses/tasks.jsonl --model_name_or_path Qwen/Qwen3-4B --output_dir runs/opencode

A row has a `question` and `files` by name. The reward is 1 if its tests pass in the end, whatever has become of them.
This is no sandbox: what the policy writes runs with your rights. docs/how_to/harnesses.md names one.
"""

import ctypes
import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

BIGGEST_FILE = 100 * 2**20
"""In bytes, for any file of a harness and for its output."""
ACCESS = ("OPENAI_", "ANTHROPIC_")
NOTHING_ELSE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"}
"""A proxy that does not exist keeps updates and telemetry from all hosts but the endpoint's."""


def solve(*command, **variables):
    """Have a harness answer the question of the row on standard input, and print the reward.

    The question is the last word of its `command`. Of this process's environment it gets `PATH` and the access to the
    policy, beside `variables`; its home is a temporary folder. Its time is the row's `limit_s`, by default 300.
    """
    row = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BIGGEST_FILE, BIGGEST_FILE))
    if sys.platform == "linux":  # PR_SET_CHILD_SUBREAPER: what a harness leaves behind becomes a child of this process
        ctypes.CDLL(None).prctl(36, 1)
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir()
        write(work, row["files"])
        kept = {name: os.environ[name] for name in os.environ if name == "PATH" or name.startswith(ACCESS)}
        own = {"HOME": str(home), "TMPDIR": str(home), "XDG_CONFIG_HOME": str(home / ".config"), **NOTHING_ELSE}
        code = run([*command, row["question"]], work, {**kept, **own, **variables}, row.get("limit_s") or 300)
        end_children()
        passed = passes(work, row["files"])
        end_children()
    if code and not passed:
        sys.exit(code)  # the harness has said why
    print(float(passed))


def write(folder, files):
    for name, text in files.items():
        if text is not None:  # of another row: all rows of a data set have the same names
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def passes(folder, files):
    """Whether the tests among the files of a row pass in a folder, as the row has them."""
    write(folder, {name: text for name, text in files.items() if name.startswith("test")})
    tests = [sys.executable, "-P", "-m", "unittest", "discover"]
    return run(tests, folder, {"PATH": os.environ["PATH"]}, 60, subprocess.DEVNULL) == 0


def run(command, folder, environment, limit_s, output=None):
    """The exit code of a command, or None if its time was up."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": output or sys.stderr, "stderr": output}
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, cwd=folder, env=environment, timeout=limit_s, **streams).returncode


def end_children():
    while left := psutil.Process().children(recursive=True):
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
