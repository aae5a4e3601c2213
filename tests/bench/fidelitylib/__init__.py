"""Parts of the fidelity benchmark: what is compared, how far pictures are apart, what it shows."""
