"""What logits become before the best token is taken: penalties, filters, and noise by counter."""
