"""The parts of scripts/gpu_evidence: which cases, what a rank runs of them, and the table."""
