"""The demonstration: a small trained checkpoint of digits, its sampler, a recogniser, and what `slipcast demo` does."""
