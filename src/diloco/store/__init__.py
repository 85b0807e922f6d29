"""The durable state of a run: the store, its copies and repair, its journal."""
