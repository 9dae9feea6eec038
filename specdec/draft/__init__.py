"""What proposes tokens, and decides how many are worth it. It knows no family and no rule of choice."""
