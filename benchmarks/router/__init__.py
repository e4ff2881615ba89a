"""What routers cost: ours and others', side by side over the same mock engines."""
