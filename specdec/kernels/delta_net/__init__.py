"""A gated delta net between its two projections: convolution, gates, recurrence, gated norm."""
