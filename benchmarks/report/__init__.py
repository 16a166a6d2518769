"""What `gpu_report.py` is made of: blocks that measure, a budget that chooses them, and tables of what came out."""
