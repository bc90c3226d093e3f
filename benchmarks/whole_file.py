"""Files that are written whole: one that is there stays until the new one is complete."""

import pathlib


def write_whole(path, data):
    """Puts a file of this text or these bytes in the place of `path`; leaves it as it was after an error."""
    path = pathlib.Path(path)
    part = path.with_name(path.name + ".part")
    try:
        if isinstance(data, str):
            part.write_text(data, encoding="utf-8")
        else:
            part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
