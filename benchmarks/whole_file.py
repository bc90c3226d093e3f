"""Files that are written whole: one that is there stays until the new one is complete."""

import pathlib


def write_whole(path, data):
    """Puts a file of this text or these bytes in the place of `path`; leaves it as it was after an error. A device or
    a pipe is written to itself."""
    path = pathlib.Path(path)
    data = data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
