"""What holds for all tests."""

import gc

import torch

# each worker has a core: two threads that wait for each other make a call on a few elements cost milliseconds
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """No collection walks again what was imported: hundreds of thousands of objects."""
    gc.collect()
    gc.freeze()
