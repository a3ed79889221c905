"""For users of torch.distributed.checkpoint: its planners and state dicts, this format on disk.

    dcp.save(state, storage_writer=PolyfleetStorageWriter(root, step))
    dcp.load(state, storage_reader=PolyfleetStorageReader(root))

FSDP2 and DTensor states are cut as their mesh is; any other mesh loads them. Values that are no tensors go into the
manifest as JSON, so nothing is pickled into a checkpoint or out of one.
"""

from workers.checkpoint.dcp.storage_reader import PolyfleetStorageReader as PolyfleetStorageReader
from workers.checkpoint.dcp.storage_writer import PolyfleetStorageWriter as PolyfleetStorageWriter
