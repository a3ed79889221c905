"""Storage reader and writer with which torch.distributed.checkpoint (DCP) uses Polyfleet checkpoints.

    dcp.save(state, storage_writer=PolyfleetStorageWriter(root, step))
    dcp.load(state, storage_reader=PolyfleetStorageReader(root))

FSDP2 and DTensor states are sharded as their mesh is; any other mesh can load them. Values other than tensors are
stored in the manifest as JSON, so nothing is pickled or unpickled.
"""

from workers.checkpoint.dcp.storage_reader import PolyfleetStorageReader as PolyfleetStorageReader
from workers.checkpoint.dcp.storage_writer import PolyfleetStorageWriter as PolyfleetStorageWriter
