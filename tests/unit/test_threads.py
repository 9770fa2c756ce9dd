from __future__ import annotations

import subprocess
import sys

HANGING = """
import threading
from sorl_trl.threads import DaemonThreads
threads = DaemonThreads(1, "hangs")
threads.submit(threading.Event().wait)
"""


def test_one_that_hangs_does_not_keep_the_process() -> None:
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=60)
