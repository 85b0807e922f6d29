"""What is durable of a run: on one disk, its copies, its journal."""
