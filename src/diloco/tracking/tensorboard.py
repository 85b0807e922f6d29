"""TensorBoard: an event file in `<folder>/tensorboard/<name>`, a new one beside the others at each start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco.tracking.base import Point, TrackedRun


class TensorBoard:
    """Logs to a folder; TensorBoard reads all files of a folder as one run.

    Arguments:
        folder: of everything that the run's trackers keep.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open a file, with the configuration as its first text."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        self._writer = EventFileWriter(str(self._folder / run.name))
        text = "".join(f"    {line}\n" for line in json.dumps(run.config, indent=1).splitlines())  # as Markdown's code
        metadata = create_summary_metadata(display_name="config", description="")
        tensor = make_tensor_proto([text.encode()])
        self._add(Summary(value=[Summary.Value(tag="config", metadata=metadata, tensor=tensor)]), None, 0)

    def log(self, point: Point) -> None:
        """Write the values as scalars, in fp32, through to the operating system."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._add(Summary(value=values), point.t, point.step)

    def _add(self, summary: Any, t: float | None, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=t or 0.0, step=step, summary=summary))
        self._writer.flush()

    def end(self) -> None:
        """Close the file."""
        self._writer.close()
