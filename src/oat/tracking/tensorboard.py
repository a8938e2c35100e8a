"""The sink TensorBoard, with its own library. It writes the metrics of a run to `RUN/tensorboard`.

Each process of a run deletes the files of earlier ones and writes them again from row 0. So the files have
each point exactly once, also after a kill or a fork, or if this sink is turned on late in a run. The names of
its files end in `.oat`, so that it deletes no file of another program. The library's option
`purge_step` would not do this: it leaves the points of a killed process in the files, where readers other
than TensorBoard find them.

The library tensorboardX is smaller. It is not used, because it has no viewer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oat.tracking.base import Opening, Row

_ENDING = ".oat"


@dataclass(frozen=True)
class TensorBoardConfig:
    pass


class TensorBoard:
    Config = TensorBoardConfig
    extra = "tensorboard"
    place = ()
    told = ()
    begins_anew = True

    def open(self, run: Opening) -> str:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard"
        # before there was an ending, no process had an id, and the state of the sink was there already
        has_none = run.id is None and (run.folder / "sinks" / "tensorboard.json").exists()
        for older in folder.glob(f"events.out.tfevents.*{'' if has_none else _ENDING}"):
            older.unlink()
        self._writer = EventFileWriter(str(folder), flush_secs=10, filename_suffix=_ENDING)
        return _ENDING

    def row(self, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        points += [_text(f"samples/{number}", sample) for number, sample in enumerate(row.samples)]
        self._writer.add_event(Event(wall_time=row.seconds, step=row.step, summary=Summary(value=points)))

    def close(self) -> None:
        self._writer.close()


def _text(tag: str, sample: Mapping[str, Any]) -> Any:
    """Return a sample for TensorBoard's page of texts. The text is a block of code, because TensorBoard would
    read other text as Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    lines = json.dumps(sample, ensure_ascii=False, indent=1).splitlines()
    text = "\n".join(f"    {line}" for line in lines)
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, metadata=about, tensor=tensor)
