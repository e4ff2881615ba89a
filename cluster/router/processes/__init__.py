"""Several router processes on one port: each follows all engines by itself, one parent starts and watches them."""
