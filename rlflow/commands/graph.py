"""`rlflow graph`: an algorithm's graph with the place of every node, the plan of a rank, and the graph as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlflow.commands.configuration import Configured, call_configured
from rlflow.commands.parser import writing
from rlflow.dag.drawing import mermaid, text
from rlflow.data.mixture import settings_of
from rlflow.errors import UserError
from rlflow.run.prepare import plan_run


def graph(configured: Configured, /, rank: int = 0, draw: Path | None = None) -> None:
    """Print an algorithm's graph and a rank's plan.

    Args:
        configured: The algorithm, and its ranks.
        rank: Rank whose plan is printed.
        draw: Write the graph in Mermaid: PATH.md or .mmd.
    """
    if draw is not None and draw.suffix not in (".md", ".mmd"):
        raise UserError(f"`--draw` is {str(draw)!r}, and graphs are drawn in Mermaid; end it in .md or .mmd")
    trainer = configured.trainer
    if not 0 <= rank < trainer.world_size:
        raise UserError(f"`--rank` is {rank}, but the config has the ranks 0 to {trainer.world_size - 1}; name one")
    of_datasets = settings_of(configured.data.train)
    run = plan_run(configured.module, trainer.settings, trainer.engine_settings, of_datasets)
    print(text(run.graph, run.plan, rank))
    if draw is not None:
        drawing = mermaid(run.graph, run.plan)
        with writing("draw"):
            draw.parent.mkdir(parents=True, exist_ok=True)
            draw.write_text(f"```mermaid\n{drawing}```\n" if draw.suffix == ".md" else drawing)
        print(f"drew {draw}")


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow graph`."""
    call_configured(graph, arguments)
