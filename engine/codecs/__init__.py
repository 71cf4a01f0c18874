"""One codec for each quantisation format: from a float matrix to codes and scales, and back."""
