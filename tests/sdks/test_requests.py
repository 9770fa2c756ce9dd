"""What else SDKs ask for: answers of a type, a handoff to another agent, and what they do with an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from sorl_trl.endpoint.agents import run_agent as start_agent
from sorl_trl.endpoint.conversation import Conversation
from sorl_trl.endpoint.server import Endpoint
from sorl_trl.types import StopReason
from tests.endpoint import ScriptedEngine, collect, run_agent, without_a_rollout
from tests.sdks.agents import AGENTS, with_reward
from tests.sdks.test_contexts import DSPY_SEARCHES
from tests.tools import qwen_tokenizer, tool_call


class City(BaseModel):
    name: str


def client(endpoint: Any) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)


async def openai_parse(endpoint: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": "Which city?"}]
    reply = await client(endpoint).chat.completions.parse(model="policy", messages=messages, response_format=City)
    return reply.choices[0].message.parsed


async def openai_agents(endpoint: Any, api: str = "Responses") -> Any:
    import agents

    model = getattr(agents, f"OpenAI{api}Model")(model="policy", openai_client=client(endpoint))
    settings = agents.ModelSettings(temperature=0.2, max_tokens=99, parallel_tool_calls=False)
    agent = agents.Agent(name="Geographer", model=model, output_type=City, model_settings=settings)
    return (await agents.Runner.run(agent, "Which city?")).final_output


async def langchain(endpoint: Any, method: Any = "json_schema") -> Any:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy", base_url=endpoint.base_url, api_key=endpoint.api_key, temperature=0.5)
    return await model.with_structured_output(City, method=method).ainvoke("Which city?")


async def pydantic_ai(endpoint: Any, api: str = "Chat", native: bool = False) -> Any:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(openai, f"OpenAI{api}Model")("policy", provider=OpenAIProvider(openai_client=client(endpoint)))
    agent: Any = Agent(model, output_type=NativeOutput(City) if native else City)
    return (await agent.run("Which city?", model_settings={"max_tokens": 99, "seed": 1})).output


BY_SCHEMA: dict[str, Callable[..., Any]] = {
    "openai": openai_parse,
    "openai-agents, responses": openai_agents,
    "openai-agents, chat": partial(openai_agents, api="ChatCompletions"),
    "langchain": langchain,
    "pydantic-ai, chat": partial(pydantic_ai, native=True),
    "pydantic-ai, responses": partial(pydantic_ai, api="Responses", native=True),
}
BY_TOOL: dict[str, Callable[..., Any]] = {
    "langchain": partial(langchain, method="function_calling"),
    "pydantic-ai, chat": pydantic_ai,
    "pydantic-ai, responses": partial(pydantic_ai, api="Responses"),
}


def schemas_of(answer: Callable[..., Any], say: Any) -> list[Any]:
    """The schemas of an agent's turns. What it returns must be a `City`."""

    async def agent(example: Any, endpoint: Any) -> float:
        return float(await answer(endpoint) == City(name="Oslo"))

    ran = run_agent(agent, {}, qwen_tokenizer(), say, constrains=True)
    assert ran.rewards == {"reward": 1.0}
    return ran.engine.schemas


@pytest.mark.parametrize("name", BY_SCHEMA)
def test_the_schema_of_an_answer_reaches_the_engine(name: str) -> None:
    (schema,) = schemas_of(BY_SCHEMA[name], lambda read, number: '{"name": "Oslo"}')
    assert [*schema["properties"]] == ["name"]


@pytest.mark.parametrize("name", BY_TOOL)
def test_an_answer_may_be_the_arguments_of_a_call(name: str) -> None:
    def say(read: str, number: int) -> str:
        (offered,) = re.findall(r'"function": \{"name": "(\w+)"', read)
        return tool_call(offered, name="Oslo")

    assert schemas_of(BY_TOOL[name], say) == [None]


def test_agents_of_a_handoff_have_roles() -> None:
    async def agent(example: Any, endpoint: Any) -> float:
        import agents

        planner, searcher = (
            agents.OpenAIResponsesModel(model=role, openai_client=client(endpoint)) for role in ("planner", "searcher")
        )
        expert = agents.Agent(name="Expert", model=searcher, instructions="You search.")
        chief = agents.Agent(name="Chief", model=planner, instructions="You plan.", handoffs=[expert])
        return float("Norway" in (await agents.Runner.run(chief, "Where is Oslo?")).final_output)

    def say(read: str, number: int) -> str:
        return tool_call("transfer_to_expert") if "You plan." in read else "It is in Norway."

    ran = run_agent(agent, {}, qwen_tokenizer(), say)
    assert ran.rewards == {"reward": 1.0}
    assert [turn.agent for turn in ran.trajectory.turns] == ["planner", "searcher"]


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The HTTP status of each request."""
    statuses, answer = list[int](), Endpoint._answer

    async def noted(self: Any, *args: Any) -> Any:
        answered = await answer(self, *args)
        statuses.append(answered[0])
        return answered

    monkeypatch.setattr(Endpoint, "_answer", noted)
    return statuses


def searching(name: str, search: Any, room: int = 10**6) -> Any:
    """Run an agent whose policy always calls the tool, with room for a little more than a number of turns."""
    tokenizer, said = qwen_tokenizer(), tool_call("search", query="Oslo")
    if "CodeAgent" in name:
        said = "<code>\nprint(search(query='Oslo'))\n</code>"
    elif name == "dspy":
        said = DSPY_SEARCHES
    trajectory = room * len(tokenizer.encode(said)) + 2
    agent = with_reward(AGENTS[name], search, lambda answer: 1.0)
    return run_agent(
        agent, {"question": "Where is Oslo?"}, tokenizer, lambda read, number: said, trajectory=trajectory
    )


@pytest.mark.parametrize("name", AGENTS)
def test_a_refusal_is_final(name: str, search: Any, statuses: list[int]) -> None:
    """No SDK sends a request again for which there is no room. dspy goes on to ask for the answer."""
    ran = searching(name, search, room=1)
    assert statuses == [200, 400, *[400] * (name == "dspy")]
    assert ran.rewards == {"reward": 0.0}
    assert ran.trajectory.stop_reason == StopReason.TRAJECTORY_LIMIT


def test_litellm_knows_a_full_context_as_such() -> None:
    """Agents over it then stop, instead of asking again."""
    import litellm

    def agent(example: Any, endpoint: Any) -> float:
        access = {"api_base": endpoint.base_url, "api_key": endpoint.api_key}
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion("openai/policy", [{"role": "user", "content": "x" * 99}], num_retries=0, **access)
        return 1.0

    tokenizer = qwen_tokenizer()
    engine = ScriptedEngine(lambda *_: "Yes.", tokenizer, window=100)
    output, *_ = collect(agent, 1, engine=engine, tokenizer=tokenizer)
    assert output["agent_rewards"] == [{"reward": 1.0}]


TRIES = {"dspy": 4, "ai-sdk, chat": 3, "ai-sdk, responses": 3}


@pytest.mark.parametrize("name", AGENTS)
def test_a_failure_is_final(name: str, search: Any, statuses: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three agents ask an endpoint again that has failed, but not for ever."""

    def failing(self: Any, *args: Any) -> Any:
        raise LookupError("a defect")

    monkeypatch.setattr(Conversation, "begin", failing)
    agent, example = with_reward(AGENTS[name], search, lambda answer: 1.0), {"question": "Where is Oslo?"}
    with without_a_rollout() as access:
        assert start_agent(agent, example, access, 60, lambda _: None).result().error
    assert statuses == [500] * TRIES.get(name, 1)
