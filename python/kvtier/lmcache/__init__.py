"""LMCache's second level in `kvtier serve` (docs/engines/lmcache.md).

Importing this needs no LMCache; `kvtier.lmcache.adapter` does."""
