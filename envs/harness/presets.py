"""Harnesses shaped like common coding agents, in few words: nano contexts are short."""

from __future__ import annotations

from k3rl.envs.harness.parts import (
    Context,
    ContextKind,
    Description,
    Harness,
    Memory,
    NameCase,
    ToolStyle,
)

SHELL_AGENT = Harness(
    system_prompt="You work in a shell. One command per call.",
    tools=ToolStyle(shell="bash", descriptions=Description.USAGE),
)
"""One tool that takes command lines."""

EDITOR_AGENT = Harness(
    system_prompt="You are a coding agent. Keep a todo list. Use the tools.",
    tools=ToolStyle(
        case=NameCase.CAMEL,
        names={
            "cat": "Read", "read_file": "Read", "view": "Read",
            "ls": "List", "list_files": "List", "grep": "Search", "search": "Search",
            "shell": "Bash", "bash": "Bash", "run": "Bash", "python": "RunPython",
            "edit": "Edit", "str_replace": "Edit", "write": "Write", "write_file": "Write",
            "write_notes": "TodoWrite", "read_notes": "TodoRead",
        },
        parameters={"path": "file_path"},
    ),
    context=Context(ContextKind.COMPACTION, 0.75),
    memory=Memory("TODO.md"),
)  # fmt: skip
"""Tools named Read, Edit, Bash and so on, a todo file, and contexts that are summed up."""

PATCH_AGENT = Harness(
    system_prompt="Read the skill you need, then act with the fewest calls.",
    tools=ToolStyle(
        case=NameCase.SNAKE,
        names={
            "cat": "open_file", "read_file": "open_file", "view": "open_file",
            "ls": "list_dir", "list_files": "list_dir", "grep": "grep_files",
            "shell": "exec_command", "bash": "exec_command", "run": "exec_command",
            "python": "exec_python", "edit": "apply_patch", "str_replace": "apply_patch",
        },
        parameters={"command": "cmd", "path": "target"},
    ),
    skills={
        "search": "Find things\nSearch for a word first, then read the file that has it.",
        "patch": "Change files\nChange the least. Read the result once before you finish.",
    },
)  # fmt: skip
"""Snake-case tools, changes as patches, and skills to read."""

PRESETS = {
    "none": Harness(),
    "shell_agent": SHELL_AGENT,
    "editor_agent": EDITOR_AGENT,
    "patch_agent": PATCH_AGENT,
}
