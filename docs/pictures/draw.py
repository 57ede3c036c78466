"""Draw the graphs in the documentation anew, each from the config above it: python docs/pictures/draw.py"""

from __future__ import annotations

import re
from pathlib import Path

from rlflow.commands.fit import read_fit
from rlflow.dag.drawing import mermaid
from rlflow.run.prepare import plan_run

DOCS = Path(__file__).parent.parent
PAGES = ("algorithms.md", "concepts.md")
GRAPH = re.compile(r"<!-- (configs/\w+\.yaml) -->\n```mermaid\n(.*?)```\n", re.DOTALL)


def graphs() -> list[tuple[str, str]]:
    """The config and the drawing of each graph that the pages show."""
    return [graph for page in PAGES for graph in GRAPH.findall((DOCS / page).read_text(encoding="utf-8"))]


def drawn(config: str) -> str:
    """The graph of a config in Mermaid's language."""
    configured = read_fit(["--config", str(DOCS.parent / config)])
    trainer = configured.trainer
    run = plan_run(configured.module, trainer.settings, trainer.engine_settings)
    return mermaid(run.graph, run.plan)


if __name__ == "__main__":
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        text = GRAPH.sub(lambda graph: f"<!-- {graph[1]} -->\n```mermaid\n{drawn(graph[1])}```\n", text)
        (DOCS / page).write_text(text, encoding="utf-8")
