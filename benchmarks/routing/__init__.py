"""Routing quality: every policy of ours and the published formulas, over one trace and simulated engines."""
