"""mini-swe-agent 2.4 in this process: `sorl train --agent examples.harnesses.mini_swe_agent.agent`.

Instead of `LocalEnvironment`, its `DockerEnvironment` and `BubblewrapEnvironment` are sandboxes.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from examples.harnesses.task import passes, write


def agent(example, endpoint):
    config = get_config_from_spec("mini.yaml")
    config["model"]["model_kwargs"] = {"api_base": endpoint.base_url, "api_key": endpoint.api_key}
    model = LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors", **config["model"])
    prompts = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    with TemporaryDirectory() as folder:
        write(Path(folder), example["files"])
        solver = DefaultAgent(model, LocalEnvironment(cwd=folder), wall_time_limit_seconds=300, **prompts)
        solver.run(example["question"])
        return float(passes(Path(folder), example["files"]))
