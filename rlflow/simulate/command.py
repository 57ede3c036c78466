"""`rlflow simulate --config`: a simulation as one screen, and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlflow.simulate.picture import check_suffix, draw_simulation
from rlflow.simulate.report import screen
from rlflow.simulate.simulation import Simulation


@dataclass(frozen=True)
class ShownSimulation:
    """A simulation to be shown, and where its picture goes."""

    simulation: Simulation
    draw: Path | None

    def __post_init__(self) -> None:
        if self.draw is not None:
            check_suffix(self.draw)

    def show(self) -> None:
        """Print one screen; draw if asked."""
        print("\n".join(screen(self.simulation)))
        if self.draw is not None:
            draw_simulation(self.simulation, self.draw)
            print(f"drew {self.draw}")
