"""Tests of the device operations and of their references."""
