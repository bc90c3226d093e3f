"""The service's messages and stubs, generated from proto/kvtier/v1."""
