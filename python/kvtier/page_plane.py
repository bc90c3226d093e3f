"""Pages through memory that client and server share: read in the tenant's arena, written by way of
the staging region."""

from __future__ import annotations

import platform
from typing import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier import frames
from kvtier.data_plane import Channel

_READ_BATCH = 256

#: Where reads are made in the order of the program, so that a page that goes while it is copied is
#: seen by its generation. Elsewhere pages are read over gRPC.
READS_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64")


def read(
    channel: Channel,
    handles: Sequence[str],
    page_bytes: int,
    room: Callable[[int], NDArray[np.uint8]],
    found: list[NDArray[np.uint8] | None],
    stale: set[int],
) -> None:
    """Fills `found` with the pages, copied to where `room` says by their number; the server has
    compared their checksums. None stays for one that is missing, has gone meanwhile or is damaged: to ask another way gives the reason. Those that
    had gone from where the server said that they were are in `stale`, by their number."""
    if channel.arena is None or not READS_ARE_ORDERED:
        return
    for first in range(0, len(handles), _READ_BATCH):
        batch = [handle.encode() for handle in handles[first : first + _READ_BATCH]]
        wanted = frames.encode_descriptors([(handle, page_bytes, 0) for handle in batch])
        at = first
        for control in channel.exchange(frames.READ_PAGES, wanted, frames.SERVER_SUMS):
            for outcome in frames.decode_outcomes(control):
                good = outcome.code == 0 and outcome.bytes == page_bytes
                if at < len(found) and good:
                    page = room(at)
                    if channel.arena.copy(outcome.slot, outcome.generation, page):
                        found[at] = page
                    else:
                        stale.add(at)
                at += 1


def write(
    channel: Channel,
    lease: str,
    pages: Sequence[tuple[str, NDArray[np.uint8]]],
    outcomes: list[frames.PageOutcome],
) -> None:
    """Writes and commits reserved pages, as far as they fit into the staging region; the server sums
    them. Adds outcomes of the first pages to `outcomes`, which is empty, batch by batch, so that those
    before one that fails are known."""
    staging = channel.staging
    while len(outcomes) < len(pages):
        placed: list[tuple[bytes, int, int]] = []
        at = 0
        for handle, data in pages[len(outcomes) : len(outcomes) + frames.MAX_TENSORS]:
            if at + len(data) > len(staging):
                break
            np.copyto(staging[at : at + len(data)], data)
            placed.append((handle.encode(), len(data), at))
            at += frames.aligned(len(data))
        if not placed:
            break
        control = frames.encode_write(lease, placed)
        (reply,) = channel.exchange(frames.WRITE_PAGES, control, frames.SERVER_SUMS)
        answered = frames.decode_outcomes(reply)
        if len(answered) != len(placed):
            raise frames.FrameError(f"expected {len(placed)} outcomes, found {len(answered)}")
        outcomes.extend(answered)
