"""What holds for all tests."""

import gc


def pytest_collection_finish() -> None:
    """No collection walks again what was imported: hundreds of thousands of objects."""
    gc.collect()
    gc.freeze()
