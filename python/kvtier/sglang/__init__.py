"""SGLang's prefix cache in `kvtier serve`: a storage backend of its hierarchical cache
(docs/engines/sglang.md).

Importing this needs no SGLang; `kvtier.sglang.storage` does."""
