"""How tools start Python in a sandbox."""

from __future__ import annotations

START = """import builtins, _sitebuiltins
builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "")
del builtins, _sitebuiltins
exec(compile(__import__("sys").stdin.read(), "<stdin>", "exec"))"""
PYTHON = ("python3", "-S", "-s", "-c", START)
"""Runs the program on its input without the site module, which takes a quarter of Python's start
and would let the host's packages in; of what that module adds, programs get `exit` and `quit`."""
