"""Fused kernels for quantised layers, in Triton, each beside the plain torch version that it must equal bit for bit."""
