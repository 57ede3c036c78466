"""TensorBoard, by reading back what it wrote."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlflow.loggers import TensorBoardLogger


def recorded(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_metrics_stand_at_their_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.start(tmp_path)
    logger.log_metrics({"reward/mean": 0.5}, step=1)
    logger.log_metrics({"reward/mean": 0.75}, step=2)
    logger.finish()
    assert [(event.step, event.value) for event in recorded(tmp_path).Scalars("reward/mean")] == [(1, 0.5), (2, 0.75)]


def test_samples_and_config_are_text(tmp_path: Path) -> None:
    logger = TensorBoardLogger(samples=1)
    logger.start(tmp_path)
    logger.log_config({"seed": 3})
    said = [{"role": "user", "content": "1+1=\n?"}, {"role": "tool", "name": "add", "content": "2", "ended": "over"}]
    first = {"prompt": "1+1=", "response": "2", "messages": said}
    logger.log_samples([first, {"prompt": "left out", "response": ""}], step=1)
    logger.finish()
    events = recorded(tmp_path)
    (samples,) = events.Tensors("samples/text_summary")
    (text,) = samples.tensor_proto.string_val
    assert b'"prompt": "1+1="' in text
    assert text.endswith(b"    }\n\n    user: 1+1=\n    ?\n    \n    tool add: 2\n    \n    (over)\n")
    assert b"left out" not in text
    assert b'"seed": 3' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_a_run_that_goes_on_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    for first_step, steps, value in ((0, (1, 2, 3), 0.0), (2, (2, 3), 1.0)):
        logger = TensorBoardLogger()
        logger.start(tmp_path, first_step)
        for step in steps:
            logger.log_metrics({"x": value}, step)
        logger.finish()
    assert [(event.step, event.value) for event in recorded(tmp_path).Scalars("x")] == [(1, 0.0), (2, 1.0), (3, 1.0)]
