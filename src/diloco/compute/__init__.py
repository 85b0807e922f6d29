"""The arithmetic of `core` on the cores of this machine: loops that are compiled at run time, and threads."""
