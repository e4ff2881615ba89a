"""Lookaside routing: the router names an engine, the client speaks to it directly."""
