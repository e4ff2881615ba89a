"""Simulated engines: real scheduling over a device-time model, in real time or under a virtual clock."""
