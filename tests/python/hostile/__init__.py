"""Attacks on a `kvtier serve` of two tenants: one attacks, the other's answers are all checked."""
