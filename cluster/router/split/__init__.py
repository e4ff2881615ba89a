"""Prompts computed on one engine and answered by another: prefill/decode disaggregation."""
