"""Serves the policy behind the APIs of OpenAI and Anthropic, to train existing agents. Each API call is a turn."""

from sorl_trl.endpoint.agents import Access, AgentMistake, command_agent
from sorl_trl.endpoint.rollout import EndpointRollout, agent_reward

__all__ = ["Access", "AgentMistake", "EndpointRollout", "agent_reward", "command_agent"]
