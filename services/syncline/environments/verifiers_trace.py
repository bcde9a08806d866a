"""An episode as the record that rewards of the `verifiers` library read, and the answers of its tools."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncline.environments.turns import ToolCall, Turn


def trace_of(task: Any, prompt: str, turns: Sequence[Turn]) -> Any:
    """A `Trace` of one branch: the prompt, each turn, and what the environment answered to it."""
    from verifiers.v1 import types
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    said: list[tuple[Any, bool]] = [(types.UserMessage(content=prompt), False)]
    for turn in turns:
        said.append((types.AssistantMessage(content=turn.text), True))
        for place, message in enumerate(turn.observed):
            said.append((types.ToolMessage(content=message.content, tool_call_id=f"call_{place}"), False))
    nodes = [
        MessageNode(message=message, sampled=sampled, parent=place - 1 if place else None)
        for place, (message, sampled) in enumerate(said)
    ]
    told = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return Trace(task=told, agent=AgentInfo(config=AgentConfig()), nodes=nodes, is_completed=True, ok=True)


def answer_of(tools: Mapping[str, Callable[..., Any]], call: ToolCall) -> str:
    """What the called tool returns, or what is wrong with the call."""
    if call.tool not in tools:
        return f"error: there is no tool {call.tool!r}"
    try:
        inspect.signature(tools[call.tool]).bind(**call.arguments)
    except TypeError as error:
        return f"error: {error}"
    answer = tools[call.tool](**call.arguments)
    return str(asyncio.run(answer) if inspect.iscoroutine(answer) else answer)
