"""Which releases of an engine a connector has been tested with."""

from __future__ import annotations


def check_release(engine: str, version: str, series: tuple[int, int], patch: int, part: str) -> None:
    """Raises ImportError unless `version` is of the `series`, by major and minor release, and has at
    least this `patch`. `part`: what of the engine's interface changes between releases."""
    parts = version.replace("+", ".").split(".")
    try:
        known = (int(parts[0]), int(parts[1])) == series and int(parts[2]) >= patch
    except (IndexError, ValueError):
        known = False
    if not known:
        raise ImportError(
            f"kvtier: expected {engine} {series[0]}.{series[1]}.{patch} or a later {series[0]}."
            f"{series[1]}, found {version}; its interface of {part} changes between releases"
        )
