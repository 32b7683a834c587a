"""k3rl: agentic RL post-training for the Kimi K3 model family.

Importing it loads the leaves and `register`, nothing heavy: no torch, no Ray, no gymnasium.
"""

from k3rl.envs.registry import register
from k3rl.errors import K3rlError
from k3rl.types import Message, Outcome, OutcomeKind, Task, ToolCall, ToolResult, ToolSpec

__all__ = [
    "K3rlError",
    "Message",
    "Outcome",
    "OutcomeKind",
    "Task",
    "ToolCall",
    "ToolResult",
    "ToolSpec",
    "register",
]
