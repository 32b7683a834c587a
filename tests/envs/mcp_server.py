"""MCP servers for tests, by their first argument: good ones, and each way of being a bad one."""

import os
import subprocess
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError


def good() -> MCPServer:
    server = MCPServer("good")

    @server.tool()
    def add(a: int, b: int = 1) -> str:
        """Add numbers.

        More text.
        """
        return str(a + b)

    @server.tool()
    def fail(reason: str) -> str:
        """Fail."""
        raise ToolError(reason)

    @server.tool()
    def pid() -> str:
        """Tell pids."""
        child = subprocess.Popen(["sleep", "600"])
        return f"{os.getpid()} {child.pid}"

    @server.tool()
    def die() -> str:
        """Die."""
        os._exit(3)

    @server.tool()
    def sleep(seconds: float) -> str:
        """Sleep."""
        time.sleep(seconds)
        return "slept"

    @server.tool()
    def tags(names: list[str], limits: dict[str, int] | None = None) -> str:
        """Tag."""
        return ",".join(names)

    @server.tool()
    def long() -> str:
        """Talk."""
        return "x" * 100_000

    return server


def twins() -> None:
    """Answers by hand: a server of the package refuses to list two equal names."""
    import json

    tool = {"name": "same", "inputSchema": {"type": "object"}}
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        if asked["method"] == "initialize":
            result = {
                "protocolVersion": asked["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "twins", "version": "1"},
            }
        else:
            result = {"tools": [tool, tool]}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)


def main(kind: str) -> None:
    if kind == "good":
        good().run("stdio")
    elif kind == "none":
        MCPServer("none").run("stdio")
    elif kind == "twins":
        twins()
    elif kind == "garbage":
        print("hello, I am no server", flush=True)
        time.sleep(600)
    elif kind == "silent":
        time.sleep(600)
    elif kind == "dead":
        sys.exit("cannot start: no licence")


if __name__ == "__main__":
    main(sys.argv[1])
