"""The journal of a driver's events, and the driver again from its journal."""
