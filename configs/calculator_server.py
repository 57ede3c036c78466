"""A calculator as an MCP server on standard input and output, which `mcp_agent.py` starts for each episode."""

from mcp.server import MCPServer

server = MCPServer("calculator", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if __name__ == "__main__":
    server.run()
