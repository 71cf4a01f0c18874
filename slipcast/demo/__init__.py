"""The demonstration: a small trained checkpoint of handwritten digits, its sampler and a recogniser of samples."""
